"""`prelay demo`: the main job on real input, and what each handoff moved."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.client import Answer, Client

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
)
MAX_TOKENS = 64


def run_demo(url: str, console: Console) -> None:
    """Send a few chats, stream the answers, print the table. Raises ApiFailed."""
    with Client(url) as client:
        answers = [_ask(client, prompt, console) for prompt in PROMPTS]
        status = client.get("/cluster/status")
    console.print(handoff_table(answers, status))


def _ask(client: Client, prompt: str, console: Console) -> Answer:
    console.print(f"\n[bold]> {prompt}[/bold]")
    answer = Answer()
    options = {"model": client.model(), "max_tokens": MAX_TOKENS, "temperature": 0}
    for piece in client.stream_chat(answer, [{"role": "user", "content": prompt}], **options):
        console.print(piece, end="", markup=False, highlight=False)
    console.print()
    return answer


def handoff_table(answers: list[Answer], status: dict[str, Any]) -> Table:
    """One row an answer, joined with its handoff by the request's id. prompt, cached, answer: tokens."""
    table = Table(title="Handoffs", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("prompt", "cached", "blocks", "MiB", "lane", "GB/s", "TTFT ms", "ITL ms", "answer"):
        table.add_column(column, justify="right", no_wrap=True)
    for answer in answers:
        record = next((r for r in status["recent"] if answer.answer_id.endswith(r["request_id"])), None)
        if record is not None:
            table.add_row(*_row(answer, record))
    return table


def _row(answer: Answer, record: dict[str, Any]) -> list[str]:
    transfer = record["transfer"]
    moved = ["-", "-", "-", "-"]
    if transfer is not None:
        speed = transfer["bytes_moved"] / transfer["seconds"] / 1e9
        moved = [str(transfer["blocks"]), f"{transfer['bytes_moved'] / 2**20:.2f}", transfer["lane"], f"{speed:.2f}"]
    return [
        str(record["prompt_tokens"]),
        str(record["cached_tokens"]),
        *moved,
        f"{answer.ttft_s * 1e3:.0f}",
        f"{answer.itl_s * 1e3:.1f}",
        str(answer.usage.get("completion_tokens", "")),
    ]
