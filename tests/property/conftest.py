import pytest
from determinism import steps_taken


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the state machines has run: the number of their steps is a promise of the project."""
    if steps_taken:
        parts = ", ".join(f"{name} {count:,}" for name, count in steps_taken.items())
        terminalreporter.write_line(f"state machine steps: {steps_taken.total():,} ({parts})")
