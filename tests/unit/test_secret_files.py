"""Where the cluster's secret and the API's keys come from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.launch import _node_config
from cluster.secret_files import MAX_FILE_BYTES, SECRET_BYTES, api_keys, cluster_secret
from cluster.settings import Settings, SettingsError, load_settings
from device.models import ModelFolder

SETTINGS = ("cluster_secret_file", "api_keys_file")
READERS: dict[str, Callable[[Settings], object]] = {
    "cluster_secret_file": cluster_secret,
    "api_keys_file": lambda settings: api_keys(settings, []),
}
CONTENT = b"0123456789abcdef0123456789abcdef\n"


def settings_with(tmp_path: Path, setting: str, content: bytes, mode: int = 0o600) -> Settings:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return load_settings(None, {setting: str(path)})


def test_without_a_file_each_cluster_has_a_secret_of_its_own() -> None:
    made = {cluster_secret(Settings()) for _ in range(3)}
    assert len(made) == 3
    assert {len(secret) for secret in made} == {SECRET_BYTES}


def test_all_machines_with_one_file_have_one_secret(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "cluster_secret_file", CONTENT)
    assert cluster_secret(settings) == CONTENT.strip()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o601, 0o644, 0o777], ids=oct)
def test_a_file_that_others_can_touch_is_refused(tmp_path: Path, setting: str, mode: int) -> None:
    settings = settings_with(tmp_path, setting, CONTENT, mode)
    with pytest.raises(SettingsError, match=rf"^{setting}: .*chmod 600 .*secret") as caught:
        READERS[setting](settings)
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700], ids=oct)
def test_a_file_of_ones_own_is_read(tmp_path: Path, setting: str, mode: int) -> None:
    assert READERS[setting](settings_with(tmp_path, setting, CONTENT, mode))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_missing_file_is_named(tmp_path: Path, setting: str) -> None:
    settings = load_settings(None, {setting: str(tmp_path / "nothing")})
    with pytest.raises(SettingsError, match=f"^{setting}: can't read .*nothing: No such file"):
        READERS[setting](settings)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_of_something_else_is_not_read_to_its_end(tmp_path: Path, setting: str) -> None:
    settings = settings_with(tmp_path, setting, b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(SettingsError, match=f"^{setting}: .*is over {MAX_FILE_BYTES} bytes"):
        READERS[setting](settings)


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15, b" " * 40])
def test_a_short_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    settings = settings_with(tmp_path, "cluster_secret_file", content)
    with pytest.raises(SettingsError, match="at least 16 are needed: make one"):
        cluster_secret(settings)


def test_keys_are_lines_with_comments(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "api_keys_file", b"# ours\nalpha-key\n\n  beta-key  # of the team\n")
    keys = api_keys(settings, ["gamma-key"])
    known = [key for key in ("alpha-key", "beta-key", "gamma-key", "ours", "") if keys.name_of(key.encode())]
    assert known == ["alpha-key", "beta-key", "gamma-key"]


@pytest.mark.parametrize(
    ("content", "words"), [(b"# only a comment\n", "holds no key"), (b"two words\n", "api_keys_file: an API key has")]
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        api_keys(settings_with(tmp_path, "api_keys_file", content), [])


def test_no_keys_are_no_keys() -> None:
    assert not api_keys(Settings(), [])


def test_the_secret_reaches_the_nodes_and_is_shown_nowhere() -> None:
    settings = Settings()
    config = _node_config("decode", 0, settings, settings.decode, ModelFolder("m", Path("/m")), b"very secret")
    assert config.secret == b"very secret"
    assert "very secret" not in repr(config)
