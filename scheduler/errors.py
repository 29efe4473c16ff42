"""Errors of the schedulers, by what the caller does next."""


class SchedulerError(RuntimeError):
    """Base of all; the scheduler is unchanged when one is raised by a command."""


class CommandRejected(SchedulerError):
    """This command can't be accepted: change the request or use another id."""


class StepInFlight(SchedulerError):
    """A step is launched and not settled: apply the command at the boundary."""


class InvariantBroken(SchedulerError):
    """A bug of ours: block accounting or state no longer adds up. Stop the node."""
