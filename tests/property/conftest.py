"""The default run is 120 examples of the block pool, 120 of the prefix cache and 220 of each scheduler, of 50 rules at
the most: over 30,000 rules are run, and 20,000 are promised.
"""

import pytest
from determinism import steps_taken


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if steps_taken:
        parts = ", ".join(f"{name} {count:,}" for name, count in steps_taken.items())
        terminalreporter.write_line(f"state machine steps: {steps_taken.total():,} ({parts})")
