"""Load on any OpenAI-compatible server: a fixed workload in, latencies and throughput out.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --model M --requests 64 --concurrency 8

The workload follows from the options and the seed alone, so two servers get the same requests. Latencies are seen
by the client: each chunk with choices counts as one token. Exits with 1 if any request failed. A server that wants an
API key gets that of PRELAY_API_KEY.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import Console
from rich.table import Table

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father"
)
WORDS = _WORDS.split()
PERCENTILES = (50, 90, 99)
SHOWN_FAILURES = 5
WARMUP_SEED = 1 << 32


@dataclass(frozen=True, slots=True)
class Lengths:
    """`N`, `uniform:LOW:HIGH` (both included) or `lognormal:MEDIAN:SIGMA`."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        values = [float(number) for number in numbers]
        if kind == "fixed" and len(values) == 1 and values[0] >= 1:
            return cls("fixed", values[0])
        if kind == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]:
            return cls("uniform", *values)
        if kind == "lognormal" and len(values) == 2 and values[0] >= 1 and values[1] >= 0:
            return cls("lognormal", *values)
        raise ValueError(f"{text!r} is not a length: use N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")

    def draw(self, rng: random.Random) -> int:
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "lognormal":
            return max(1, round(rng.lognormvariate(math.log(self.a), self.b)))
        return int(self.a)


@dataclass(frozen=True, slots=True)
class Workload:
    """prefix_length: words or ids that all prompts begin with. token_ids: prompts are ids in [low, high), not words."""

    n_requests: int
    input_length: Lengths
    output_length: Lengths
    prefix_length: int
    token_ids: tuple[int, int] | None
    request_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Job:
    """start_s: seconds from the beginning of the run."""

    prompt: str | list[int]
    max_tokens: int
    start_s: float


@dataclass(slots=True)
class Outcome:
    """Times in seconds; `error` is empty for a success. `gaps_s` are the times between tokens."""

    start_s: float
    ttft_s: float = 0.0
    end_to_end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str
    is_chat: bool
    temperature: float
    ignore_eos: bool
    timeout_s: float


def make_jobs(workload: Workload) -> list[Job]:
    """The same jobs for the same workload. Arrivals are a Poisson process, or all at 0 with an infinite rate."""
    rng = random.Random(workload.seed)
    prefix = _units(workload, workload.prefix_length, rng)
    jobs, now = [], 0.0
    for _ in range(workload.n_requests):
        units = prefix + _units(workload, workload.input_length.draw(rng), rng)
        prompt = " ".join(map(str, units)) if workload.token_ids is None else [int(unit) for unit in units]
        jobs.append(Job(prompt, workload.output_length.draw(rng), now))
        now += 0.0 if math.isinf(workload.request_rate) else rng.expovariate(workload.request_rate)
    return jobs


def _units(workload: Workload, n: int, rng: random.Random) -> list[str] | list[int]:
    if workload.token_ids is None:
        return rng.choices(WORDS, k=n)
    return [rng.randrange(*workload.token_ids) for _ in range(n)]


def request_body(job: Job, target: Target) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": job.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.is_chat:
        return body | {"messages": [{"role": "user", "content": job.prompt}]}
    return body | {"prompt": job.prompt}


async def run_jobs(jobs: Sequence[Job], target: Target, concurrency: int) -> tuple[list[Outcome], float]:
    """Outcomes in the order of `jobs`, and the seconds from the first start to the last end."""
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    begin = time.perf_counter()

    async def run(job: Job, client: httpx.AsyncClient) -> Outcome:
        await asyncio.sleep(max(0.0, job.start_s - (time.perf_counter() - begin)))
        async with slots:
            return await run_job(job, target, client, time.perf_counter() - begin)

    key = os.environ.get("PRELAY_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(limits=limits, timeout=target.timeout_s, headers=headers) as client:
        outcomes = await asyncio.gather(*(run(job, client) for job in jobs))
    return list(outcomes), time.perf_counter() - begin


async def run_job(job: Job, target: Target, client: httpx.AsyncClient, start_s: float) -> Outcome:
    outcome = Outcome(start_s)
    path = "/v1/chat/completions" if target.is_chat else "/v1/completions"
    begin = time.perf_counter()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            client.stream("POST", target.url + path, json=request_body(job, target)) as response,
        ):
            if response.status_code == 200:
                await _read_stream(response, outcome, begin)
                outcome.error = outcome.error or _shortfall(outcome, job, target)
            else:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"status {response.status_code}: {text}"
    except TimeoutError:
        outcome.error = f"not done within {target.timeout_s:g} seconds"
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = repr(error)
    return outcome


async def _read_stream(response: httpx.Response, outcome: Outcome, begin: float) -> None:
    """Fill `outcome` from the events. A stream without its [DONE] has failed."""
    last = begin
    async for event in _events(response):
        if event == b"[DONE]":
            outcome.end_to_end_s = last - begin
            outcome.error = "" if outcome.output_tokens else "the answer has no tokens"
            return
        now = time.perf_counter()
        data = json.loads(event)
        if error := data.get("error"):
            outcome.error = f"error event: {error}"
            return
        if data.get("choices"):
            if outcome.output_tokens == 0:
                outcome.ttft_s = now - begin
            else:
                outcome.gaps_s.append(now - last)
            outcome.output_tokens += 1
            last = now
        if usage := data.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
    outcome.error = "the stream ended without [DONE]"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Payloads of `data:` events, as soon as each is complete."""
    buffer = b""
    async for piece in response.aiter_bytes():
        *lines, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _shortfall(outcome: Outcome, job: Job, target: Target) -> str:
    """Where the end token is ignored, an answer of another length means that the servers did other work."""
    if target.ignore_eos and outcome.output_tokens != job.max_tokens:
        return f"{outcome.output_tokens} tokens came instead of {job.max_tokens}"
    return ""


def summarize(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """Latencies in milliseconds and throughputs of the successes, and the failures."""
    done = [outcome for outcome in outcomes if not outcome.error]
    per_token = [(o.end_to_end_s - o.ttft_s) / (o.output_tokens - 1) for o in done if o.output_tokens > 1]
    output_tokens = sum(outcome.output_tokens for outcome in done)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "wall_s": wall_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(done) / wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / wall_s,
        "ttft_ms": _spread([outcome.ttft_s for outcome in done]),
        "inter_token_ms": _spread([gap for outcome in done for gap in outcome.gaps_s]),
        "time_per_output_token_ms": _spread(per_token),
        "end_to_end_ms": _spread([outcome.end_to_end_s for outcome in done]),
        "failures": [outcome.error for outcome in outcomes if outcome.error],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None for no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    spread = {"mean": 1000 * sum(ordered) / len(ordered)}
    return spread | {f"p{p}": 1000 * percentile(ordered, p) for p in PERCENTILES}


def percentile(ordered: Sequence[float], p: float) -> float:
    """Linear between neighbours, as numpy's default. `ordered` has at least one value."""
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


LATENCIES = {
    "TTFT": "ttft_ms",
    "inter-token latency": "inter_token_ms",
    "time per output token": "time_per_output_token_ms",
    "end to end": "end_to_end_ms",
}


def show(summary: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{summary['requests']} requests in {summary['wall_s']:.2f} s, {summary['failed']} failed")
    for heading in ("ms", "mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, key in LATENCIES.items():
        spread = summary[key] or {}
        table.add_row(name, *(f"{value:.2f}" for value in spread.values()))
    console.print(table)
    console.print(
        f"throughput: {summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} tokens/s, {summary['requests_per_s']:.2f} requests/s"
    )
    for failure in summary["failures"][:SHOWN_FAILURES]:
        console.print(f"failed: {failure}", markup=False)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of token ids: use LOW:HIGH.")
    return int(low), int(high)


def _at_least(minimum: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is under {minimum}.")
        return value

    return parse


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--url", required=True, help="server root, without /v1")
    add("--model", required=True, help="model name as the server lists it")
    add("--requests", type=_at_least(1, int), default=64)
    add("--concurrency", type=_at_least(1, int), default=8, help="most requests at once")
    add("--request-rate", type=_at_least(1e-3, float), default=math.inf, help="mean arrivals per second (Poisson)")
    add("--input-length", type=_lengths, default=Lengths("fixed", 256), help=Lengths.__doc__)
    add("--output-length", type=_lengths, default=Lengths("fixed", 64), help="tokens, in the same forms")
    add("--prefix-length", type=_at_least(0, int), default=0, help="words or ids that all prompts begin with")
    add("--token-ids", type=_id_range, metavar="LOW:HIGH", help="prompts of ids in [LOW, HIGH) instead of words")
    add("--chat", action="store_true", help="use /v1/chat/completions")
    add("--seed", type=int, default=0)
    add("--temperature", type=_at_least(0, float), default=0.0)
    add("--stop-at-eos", action="store_true", help="do not send ignore_eos")
    add("--warmups", type=_at_least(0, int), default=0, help="unmeasured requests of the same kind before the run")
    add("--timeout", type=_at_least(0.001, float), default=300.0, help="seconds for one request")
    add("--json", type=Path, help="write the options, the summary and every request to this file")
    options = parser.parse_args(arguments)
    if options.chat and options.token_ids:
        parser.error("--token-ids needs /v1/completions; leave out --chat")
    return options


def _workload(options: argparse.Namespace, n_requests: int, seed: int) -> Workload:
    return Workload(
        n_requests=n_requests,
        input_length=options.input_length,
        output_length=options.output_length,
        prefix_length=options.prefix_length,
        token_ids=options.token_ids,
        request_rate=options.request_rate,
        seed=seed,
    )


async def _run(options: argparse.Namespace, target: Target) -> tuple[list[Outcome], float]:
    """Warm-up prompts come from another seed, so that they fill no prefix cache for the measured ones."""
    if options.warmups:
        await run_jobs(
            make_jobs(_workload(options, options.warmups, options.seed + WARMUP_SEED)), target, options.concurrency
        )
    return await run_jobs(make_jobs(_workload(options, options.requests, options.seed)), target, options.concurrency)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 if any request failed."""
    options = parse_arguments(arguments)
    target = Target(
        url=options.url.rstrip("/"),
        model=options.model,
        is_chat=options.chat,
        temperature=options.temperature,
        ignore_eos=not options.stop_at_eos,
        timeout_s=options.timeout,
    )
    outcomes, wall_s = asyncio.run(_run(options, target))
    summary = summarize(outcomes, wall_s)
    show(summary, Console())
    if options.json is not None:
        report = {
            "options": vars(options) | {"json": str(options.json), "request_rate": str(options.request_rate)},
            "summary": summary,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        options.json.write_text(json.dumps(report, indent=1, default=asdict))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
