"""UCX settings that Prelay needs, put into the environment before UCX starts.

UCX reads its environment when a context is created. A setting that the user has given is left alone, even when it
makes transfers slow: `links()` then says so.
"""

import os
from collections.abc import MutableMapping

import structlog

log = structlog.get_logger()

SETTINGS: dict[str, str] = {
    # No shared memory of UCX's: who is killed while it writes into a queue there blocks that queue for all who live.
    # Nodes of one machine copy from each other's pools by themselves (ucx_shared); their words go by TCP.
    "UCX_TLS": "^sm",
    # No rendezvous in which the sender writes into the receiver's pool: a receiver whose requests have ended must
    # be quiet. Not done by RNDV_SCHEME=get_zcopy, which turns rendezvous off on TCP.
    "UCX_PROTOS": "^rndv/put/*",
    # UCX prints its messages (a dead peer's segment can't be opened, ...) to stdout, which belongs to the program.
    "UCX_LOG_FILE": "stderr",
    # ucxx itself sets variables that this UCX may not know; the warning would be about ours, not the user's.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

_logged = False


def apply_settings(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Add the settings that `environ` lacks; returns those added."""
    added = {name: value for name, value in SETTINGS.items() if name not in environ}
    environ.update(added)
    return added


def prepare_ucx() -> None:
    """Apply the settings to this process, and log them once."""
    global _logged
    added = apply_settings(os.environ)
    if not _logged:
        _logged = True
        log.info("ucx settings", added=added, kept={n: os.environ[n] for n in SETTINGS if n not in added})
