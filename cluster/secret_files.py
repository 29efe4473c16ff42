"""Secrets that a cluster is started with: what its nodes prove to each other, and the API's keys. Never logged."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from cluster.api_keys import ApiKeys
from cluster.settings import Settings, SettingsError

SECRET_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_FILE_BYTES = 64 << 10


def cluster_secret(settings: Settings) -> bytes:
    """From `cluster_secret_file`, else a random one, which only this cluster will ever have. Raises SettingsError."""
    path = settings.cluster_secret_file
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    secret = _read_private(path, "cluster_secret_file").strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise SettingsError(
            f"cluster_secret_file: {path} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed: make one"
            f" with `openssl rand -hex 32 > {path}`, and copy it to every machine of the cluster"
        )
    return secret


def api_keys(settings: Settings, given: Iterable[str]) -> ApiKeys:
    """Those `given` and those of `api_keys_file`, one a line, where # begins a comment. Raises SettingsError."""
    keys, path = list(given), settings.api_keys_file
    if path is not None:
        lines = _read_private(path, "api_keys_file").decode(errors="replace").splitlines()
        found = [key for line in lines if (key := line.partition("#")[0].strip())]
        if not found:
            raise SettingsError(f"api_keys_file: {path} holds no key: write one a line")
        keys += found
    try:
        return ApiKeys.of(keys)
    except ValueError as error:
        raise SettingsError(f"--api-key, PRELAY_API_KEY or api_keys_file: {error}") from None


def _read_private(path: Path, setting: str) -> bytes:
    """Raises SettingsError for a file that can't be read, is too long, or that others may read or write."""
    try:
        # Looked at when it is open, so that it's the file that is read.
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{setting}: can't read {path}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{setting}: others than its owner have access to {path}: run `chmod 600 {path}`")
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{setting}: {path} is over {MAX_FILE_BYTES} bytes, so it's hardly the right file")
    return content
