"""Errors of the cluster as a whole."""


class NoNodeLeft(RuntimeError):
    """No node of a pool is alive, so nothing can be served."""


class NodeLost(RuntimeError):
    """A node's process is gone."""


class LaunchFailed(RuntimeError):
    """The cluster did not start; the message says why, and nothing of it is left."""
