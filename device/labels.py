"""Short texts for what a device is asked: one line of a trace each."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from scheduler.adapters import LoraCommand
from scheduler.contract import DecodeFed, Row, StepPlan
from scheduler.effects import Effect


def plan_label(plan: StepPlan) -> str:
    """The plan's kind, and of each row which positions it computes, and whether it only does that."""
    if isinstance(plan, DecodeFed):
        return f"decode_fed {', '.join(f'{row.request_id}[{row.end}:{row.end + 1}]' for row in plan.rows)}"
    return f"{_snake(plan)} {', '.join(map(_row_label, plan.rows))}"


def effect_label(asked: Effect | LoraCommand) -> str:
    """Its kind and all that it says."""
    return " ".join([_snake(asked), *(f"{part.name}={_value(getattr(asked, part.name))}" for part in fields(asked))])


def _row_label(row: Row) -> str:
    return f"{row.request_id}[{row.start}:{row.end}]{'' if row.draw else ' no draw'}"


def _value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({','.join(map(_value, value))})"
    return str(value)


def _snake(asked: object) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(asked).__name__).lower()
