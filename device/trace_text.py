"""A trace of a device as text: a line for each call, `what was asked -> what was answered`, the answer as JSON."""

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from scheduler.adapters import AdapterFacts, AdapterRefused
from scheduler.contract import DeviceError, Fault, KvExhausted
from scheduler.effects import Done, EffectOutcome, Exhausted, HostLogits, Reserved, Saved

Tokens: TypeAlias = tuple[int | None, ...]
Adapters: TypeAlias = tuple[AdapterFacts, ...]
_ARROW = " -> "


@dataclass(frozen=True, slots=True)
class LostResult:
    """A step was launched, and its result was an error."""

    error: DeviceError


Answer: TypeAlias = Tokens | Adapters | EffectOutcome | DeviceError | AdapterRefused | LostResult | None
"""None: of a step that nobody awaited, and of a teardown."""


class TraceBroken(RuntimeError):
    """A trace can't be read, or the calls are not those of the trace: the message has both."""


@dataclass(slots=True)
class TraceLine:
    asked: str
    answer: Answer = None

    def text(self) -> str:
        return f"{self.asked}{_ARROW}{json.dumps(_to_json(self.answer))}"


def parse_trace(text: str) -> list[TraceLine]:
    """The lines of a trace; empty ones are skipped. Raises TraceBroken."""
    return [_parse_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _parse_line(number: int, line: str) -> TraceLine:
    asked, arrow, answer = line.partition(_ARROW)
    try:
        if not arrow:
            raise ValueError("no answer")
        return TraceLine(asked, _from_json(json.loads(answer)))
    except (ValueError, KeyError, TypeError) as error:
        raise TraceBroken(f"line {number} of the trace can't be read: {line!r}: {error}") from error


def _to_json(answer: Answer) -> Any:
    match answer:
        case None:
            return None
        case LostResult(error):
            return {"lost": _to_json(error)}
        case DeviceError():
            return {"fault": answer.fault.value, "exhausted": isinstance(answer, KvExhausted), "says": _says(answer)}
        case AdapterRefused():
            return {"refused": str(answer)}
        case Done():
            return "done"
        case Exhausted():
            return "exhausted"
        case Saved(size):
            return {"saved": size}
        case Reserved(blocks):
            return {"reserved": list(blocks)}
        case HostLogits(content, element_bytes):
            return {"logits": content.hex(), "element_bytes": element_bytes}
        case _:
            return _rows_to_json(answer)


def _rows_to_json(rows: Tokens | Adapters) -> Any:
    adapters = [row for row in rows if isinstance(row, AdapterFacts)]
    if adapters:
        return {"adapters": [[row.name, row.digest, row.rank, list(row.target_modules)] for row in adapters]}
    return list(rows)


def _says(error: DeviceError) -> str:
    return str(error).removeprefix(f"{error.fault.value}: ")


def _from_json(given: Any) -> Answer:
    match given:
        case None:
            return None
        case "done":
            return Done()
        case "exhausted":
            return Exhausted()
        case list():
            return tuple(given)
        case {"lost": error}:
            return LostResult(_error(error))
        case {"fault": _}:
            return _error(given)
        case {"refused": reason}:
            return AdapterRefused(reason)
        case {"saved": size}:
            return Saved(size)
        case {"reserved": blocks}:
            return Reserved(tuple(blocks))
        case {"logits": content, "element_bytes": element_bytes}:
            return HostLogits(bytes.fromhex(content), element_bytes)
        case {"adapters": rows}:
            return tuple(AdapterFacts(name, digest, rank, tuple(modules)) for name, digest, rank, modules in rows)
        case _:
            raise ValueError(f"unknown answer {given!r}")


def _error(given: Any) -> DeviceError:
    return KvExhausted(given["says"]) if given["exhausted"] else DeviceError(Fault(given["fault"]), given["says"])
