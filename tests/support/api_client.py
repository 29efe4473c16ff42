"""The API over a cluster that answers "hello" over and over, and a client of it."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from stand_ins import Script, ScriptedGateway, byte_level_tokenizer

from cluster.api import ApiSettings, ChatTokenizer, create_app
from cluster.api_keys import ApiKeys
from scheduler.ids import RequestId

MAX_MODEL_LEN = 64
EOS = frozenset({0})
TOKENIZER = ChatTokenizer(byte_level_tokenizer(["hello hello world"]))
HELLO = TOKENIZER.encode("hello", add_special_tokens=False)


def hello_gateway() -> ScriptedGateway:
    return ScriptedGateway(lambda request: Script(itertools.cycle(HELLO)))


@asynccontextmanager
async def open_client(gateway: ScriptedGateway, keys: ApiKeys | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Bodies up to 4096 bytes, 3 prompts, 2 stop strings of 8 characters, 2 stop tokens; ids r0, r1, ..., seed 77."""
    ids = itertools.count()
    app = create_app(
        gateway,
        TOKENIZER,
        "tiny",
        MAX_MODEL_LEN,
        EOS,
        ApiSettings(max_body_bytes=4096, max_prompts=3, max_stop_strings=2, max_stop_chars=8, max_stop_token_ids=2),
        lambda: RequestId(f"r{next(ids)}"),
        lambda: 0.0,
        new_seed=lambda: 77,
        unix_time=lambda: 1_700_000_000.5,
        keys=keys,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client
