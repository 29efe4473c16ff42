"""`prelay doctor`: what on this machine, or between the nodes of a running server, breaks or slows serving.

Collectors read facts (`machine_facts`, `cuda_facts`, `versions`, and two child processes of `handoff/transports`), pure
checks turn facts into findings (`*_checks`), `examine` joins them, `view` shows them.
"""
