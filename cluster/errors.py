"""Errors of the command line, by what its user does next."""


class LaunchFailed(RuntimeError):
    """The cluster did not start; the message says why, and nothing of it is left."""
