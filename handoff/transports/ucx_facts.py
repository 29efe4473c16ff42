"""What UCX says of itself. `python -m handoff.transports.ucx_facts` prints it as JSON, from a process of its own.

A process of its own, since loading UCX reads the environment and can't be undone, and a broken UCX may crash.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from handoff.transports.child_answer import answer_of
from handoff.transports.ucx_env import prepare_ucx

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*\s(\S+/\S+)\s*$", re.MULTILINE)
_MODULE = re.compile(r"libuct_(\w+)\.so")
_LIBRARY = re.compile(r"(/\S*/libucp\.so\S*)")


@dataclass(frozen=True, slots=True)
class UcxFacts:
    """path: of the loaded libucp. modules: transports built as plugins ("cma", "cuda", "ib", "rdmacm", ...).

    lanes: transport/device pairs that UCX can use here with the environment as it is ("tcp/eth0", "rc_mlx5/mlx5_0:1").
    """

    version: str
    path: str
    from_wheel: bool
    modules: tuple[str, ...]
    lanes: tuple[str, ...]

    @property
    def transports(self) -> set[str]:
        return {lane.split("/")[0] for lane in self.lanes}


def lanes_in(text: str) -> tuple[str, ...]:
    """text: what UCX prints of a context."""
    return tuple(_RESOURCE.findall(text))


def modules_in(names: Iterable[str]) -> tuple[str, ...]:
    """names: files of UCX's plugin folder."""
    return tuple(sorted({match[1] for name in names if (match := _MODULE.match(name))}))


def library_in(maps: str) -> str:
    """maps: /proc/self/maps. Empty if libucp isn't there."""
    match = _LIBRARY.search(maps)
    return match[1] if match else ""


def read_ucx_facts() -> UcxFacts:
    """Loads UCX into this process."""
    prepare_ucx()
    import ucxx._lib.libucxx as ucx

    text = ucx.UCXContext().info
    path = Path(library_in(Path("/proc/self/maps").read_text())).resolve()
    plugins = path.parent / "ucx"
    return UcxFacts(
        version=".".join(str(number) for number in ucx.get_ucx_version()),
        path=str(path),
        from_wheel=_wheel_folder() in path.parents,
        modules=modules_in(os.listdir(plugins) if plugins.is_dir() else ()),
        lanes=lanes_in(text),
    )


def _wheel_folder() -> Path | None:
    spec = find_spec("libucx")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def main() -> None:
    with answer_of() as answer:
        answer(msgspec.json.encode(read_ucx_facts()))


if __name__ == "__main__":
    main()
