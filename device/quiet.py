"""Transformers draws progress bars on stderr, in the middle of a server's log."""

from typing import Any

from transformers.utils import logging


def no_progress_bars() -> None:
    untyped: Any = logging
    untyped.disable_progress_bar()
