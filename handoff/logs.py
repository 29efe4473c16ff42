"""Structured logs of our processes: one JSON object a line on stderr, which Ray keeps in its session's log folder."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def configure_logs(process: str) -> None:
    """process: the node's name, "coordinator" or "api"; stands in every line as `node` unless a line names another."""

    def add_process(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("node", process)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def quiet_logs() -> None:
    """For programs whose output is for people: warnings and errors only, on stderr."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
