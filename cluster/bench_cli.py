"""`prelay bench`: measure a part of Prelay on this machine, without a model."""

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from cluster.handoff_bench.figures import Figures
    from cluster.handoff_bench.spec import Spec

bench = typer.Typer(help="Measure a part of Prelay on this machine, without a model.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Keeps the names of the parts: a lone command would take the group's."""


@bench.command()
def handoff(
    blocks: Annotated[int, typer.Option(help="Blocks of each handoff.")] = 256,
    block_bytes: Annotated[int, typer.Option(help="Bytes of a block.")] = 360 << 10,
    layout: Annotated[str, typer.Option(help="contiguous or scattered.")] = "contiguous",
    handoffs: Annotated[int, typer.Option(help="How many.")] = 16,
    parallel: Annotated[int, typer.Option(help="How many at a time.")] = 1,
    transport: Annotated[str, typer.Option(help="ucx: between two processes; memory: inside this one.")] = "ucx",
    checksums: Annotated[str, typer.Option(help="sampled, full or off.")] = "sampled",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hand blocks over between a prefill and a decode node. Exit status 1 if a handoff failed or a block was lost."""
    from cluster.handoff_bench.run import measure
    from handoff.logs import quiet_logs

    spec = _spec(
        blocks=blocks,
        block_bytes=block_bytes,
        layout=layout,
        handoffs=handoffs,
        parallel=parallel,
        transport=transport,
        checksums=checksums,
    )
    quiet_logs()
    try:
        found = asyncio.run(measure(spec))
    except (TimeoutError, ConnectionError) as error:
        Console(stderr=True).print(f"prelay: the nodes did not work: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        Console().print_json(json.dumps({"spec": asdict(spec), "figures": asdict(found), "sound": found.is_sound}))
    else:
        Console().print(_table(spec, found))
    if not found.is_sound:
        raise typer.Exit(1)


def _spec(**options: str | int) -> "Spec":
    from pydantic import TypeAdapter, ValidationError

    from cluster.handoff_bench.spec import Spec

    try:
        return TypeAdapter(Spec).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ", ".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"{where}: {first['msg']}" if where else first["msg"]) from error


def _table(spec: "Spec", found: "Figures") -> Table:
    size = spec.blocks * spec.block_bytes / 1e6
    title = f"{found.handoffs} handoffs of {spec.blocks} {spec.layout} blocks, {size:.1f} MB each"
    table = Table(title=title, show_header=False, title_justify="left")
    lines = {
        "lane": found.lane or "none",
        "while bytes were on their way": f"{found.moving_gb_per_s:.2f} GB/s",
        "over all time": f"{found.wall_gb_per_s:.2f} GB/s",
        "exposed, p50 / p99": f"{found.exposed_p50_ms:.2f} / {found.exposed_p99_ms:.2f} ms",
        "first token to runnable, p50 / p99": f"{found.handed_p50_ms:.2f} / {found.handed_p99_ms:.2f} ms",
        "failed": str(found.failed),
        "compared byte by byte": f"{found.checked}, {found.damaged} damaged",
        "blocks lost": str(found.lost_blocks),
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table
