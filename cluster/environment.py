"""Environment variables of an embedded cluster's processes; one that the user has set is left alone."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The node processes inherit this: UCX's TCP lane must not listen on the outward interfaces.
    "UCX_NET_DEVICES": "lo",
}
