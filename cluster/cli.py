"""The `prelay` command."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as distribution_version
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from cluster.api_keys import ApiKeys
from cluster.bench_cli import bench
from cluster.client import Answer, ApiFailed, Client
from cluster.errors import LaunchFailed
from cluster.listener import is_loopback, open_door
from cluster.running import NoServer, announce, environ_of, find, find_any, withdraw
from cluster.secret_files import api_keys, cluster_secret
from cluster.settings import Settings, SettingsError, load_settings
from cluster.status_view import status_view
from cluster.story_view import story_lines
from handoff.packaging import ShadowedPackage, check_packages

if TYPE_CHECKING:
    from cluster.launch import Cluster

app = typer.Typer(
    help="Disaggregated LLM serving: prefill and decode pools with a transactional KV handoff over UCX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
out = Console()
err = Console(stderr=True)

KEY_VARIABLE = "PRELAY_API_KEY"
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A YAML file, or the name of a shipped one: serve.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="smollm2, a local folder, a .gguf file, or a Hugging Face id.")
]
UrlOption = Annotated[str | None, typer.Option("--url", help="A running server; default: the newest on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Where the server wants one.")
]


def main() -> None:
    """Entry point: errors that a user can act on are one sentence on stderr and exit status 1."""
    try:
        check_packages()
        app()
    except (SettingsError, ShadowedPackage, LaunchFailed, NoServer, ApiFailed) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    err.print(f"prelay: {message}", style="red", markup=False, highlight=False)
    sys.exit(1)


@app.command()
def serve(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill nodes.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode nodes.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (bf16), bf16, fp32.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:0.")] = None,
    order: Annotated[str | None, typer.Option(help="destination_first or source_first.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="A key that lets in; may be repeated. Others read it in `ps`, so better"
            " use the setting api_keys_file, or the variable.",
        ),
    ] = None,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM."""
    settings = load_settings(
        config,
        _given(
            {
                "model": model,
                "prefill.nodes": prefill,
                "decode.nodes": decode,
                "host": host,
                "port": port,
                "dtype": dtype,
                "device": device,
                "order": order,
            }
        ),
    )
    # The processes of the cluster need no keys, so they don't inherit them.
    os.environ.pop(KEY_VARIABLE, None)
    keys = api_keys(settings, api_key or [])
    if not keys and not is_loopback(settings.host):
        err.print(open_door(settings.host), style="yellow", markup=False, highlight=False)
    with _cluster(settings, keys) as cluster:
        out.print(f"Prelay serves {cluster.model} on {cluster.url}", highlight=False, soft_wrap=True)
        out.print("Press Ctrl-C to stop.")
        Event().wait()
        out.print("Stopping.")


@app.command()
def demo(config: ConfigOption = None, model: ModelOption = None) -> None:
    """Start a small cluster, ask it a few questions, show the handoffs, stop."""
    from cluster.demo import run_demo

    settings = load_settings(config, {**_given({"model": model}), "port": 0})
    with _cluster(settings) as cluster:
        run_demo(cluster.url, out)


@app.command()
def pull(model: Annotated[str, typer.Argument(help="smollm2, a .gguf file, or a Hugging Face id.")]) -> None:
    """Fetch and convert a model into the cache."""
    out.print(str(_resolve(model).path), soft_wrap=True, highlight=False)


@app.command()
def status(url: UrlOption = None, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Show nodes, links and handoffs of a running server."""
    with Client(url or find(_home()), api_key=api_key) as client:
        document = client.get("/cluster/status")
    if as_json:
        out.print_json(json.dumps(document))
    else:
        out.print(status_view(document))


@app.command()
def doctor(url: UrlOption = None, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Say what breaks or slows serving, on this machine and between the nodes of a running server.

    Exit status 0: all fine. 1: something breaks or slows serving. 2: the doctor itself could not run.
    """
    from cluster.doctor.examine import examine
    from cluster.doctor.view import report_json, report_view

    try:
        url = url or find_any(_home())
        report = examine(url, os.environ, environ_of(_home(), url) if url else {}, api_key)
    except Exception as error:
        err.print(f"prelay: the doctor could not run: {error!r}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        out.print_json(json.dumps(report_json(report)))
    else:
        out.print(report_view(report))
    raise typer.Exit(report.exit_status)


@app.command()
def story(
    request_id: Annotated[
        str, typer.Argument(help="A request's id, or the id of its answer (cmpl-..., chatcmpl-...).")
    ],
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened to a request, on every node."""
    with Client(url or find(_home()), api_key=api_key) as client:
        document = client.get(f"/cluster/story/{quote(request_id, safe='')}")
    if as_json:
        out.print_json(json.dumps(document))
        return
    for line in story_lines(document):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def chat(
    url: UrlOption = None,
    api_key: KeyOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
) -> None:
    """Talk to a running server. An empty line or Ctrl-D ends."""
    with Client(url or find(_home()), api_key=api_key) as client:
        options = {"model": client.model(), "max_tokens": max_tokens, "temperature": temperature}
        messages: list[dict[str, str]] = []
        while question := _read_line():
            messages.append({"role": "user", "content": question})
            answer = Answer()
            for piece in client.stream_chat(answer, messages, **options):
                out.print(piece, end="", markup=False, highlight=False)
            out.print()
            messages.append({"role": "assistant", "content": answer.text})


@app.command()
def version() -> None:
    """Print the version."""
    out.print(distribution_version("prelay"), highlight=False)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _home() -> Path:
    from device.models import default_home

    return default_home()


def _resolve(name: str) -> Any:
    from device.models import ModelDownloadFailed, ModelNotFound, ModelUnsupported, resolve_model

    try:
        return resolve_model(name, _home(), _progress)
    except (ModelNotFound, ModelDownloadFailed, ModelUnsupported) as error:
        _fail(str(error))


def _progress(line: str) -> None:
    err.print(line, style="dim", markup=False, highlight=False)


@contextmanager
def _cluster(settings: Settings, keys: ApiKeys | None = None) -> Iterator["Cluster"]:
    """A running cluster; it is stopped on the way out, also when a signal comes while it starts."""
    cluster_secret(settings)  # a file that is wrong is told of before anything runs
    model = _resolve(settings.model)
    err.print("Loading libraries.", style="dim")
    from cluster.launch import launch

    with _signals_raise():
        cluster = launch(settings, model, _progress, keys)
        try:
            announce(_home(), cluster.url)
            yield cluster
        except KeyboardInterrupt:
            pass
        finally:
            withdraw(_home())
            cluster.stop()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _read_line() -> str:
    if sys.stdin.isatty():
        out.print("> ", end="")
    try:
        return input().strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
