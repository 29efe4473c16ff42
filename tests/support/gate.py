"""Where a test holds the steps of a device."""

from threading import Condition

GATE_TIMEOUT_S = 30.0


class Gate:
    """Holds steps before they compute. Open at first."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._allowed: int | None = None
        self._waiting = False

    def hold(self, after_steps: int = 0) -> None:
        """Let `after_steps` more steps through, then hold each until `release`."""
        with self._changed:
            self._allowed = after_steps
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    def wait_held(self, timeout_s: float) -> bool:
        """Wait until a step is held; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting, timeout_s)

    def enter(self) -> None:
        with self._changed:
            if self._allowed == 0:
                self._waiting = True
                self._changed.notify_all()
                released = self._changed.wait_for(lambda: self._allowed != 0, GATE_TIMEOUT_S)
                self._waiting = False
                if not released:
                    raise RuntimeError("a test held a step and never released it")
            if self._allowed:
                self._allowed -= 1
