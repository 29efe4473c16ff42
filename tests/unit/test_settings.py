"""Settings: the shipped file is the defaults, overrides win, errors name the field."""

from pathlib import Path

import pytest

from cluster.settings import Settings, SettingsError, configs_folder, load_settings


def test_the_shipped_file_holds_exactly_the_defaults() -> None:
    assert load_settings(configs_folder() / "serve.yaml", {}) == Settings()
    assert load_settings(Path("serve"), {}) == Settings()


def test_every_setting_stands_in_the_shipped_file() -> None:
    text = (configs_folder() / "serve.yaml").read_text()
    shipped = load_settings(configs_folder() / "serve.yaml", {}).model_dump()
    names = [*shipped, *shipped["prefill"], *shipped["limits"]]
    assert [name for name in names if f"{name}:" not in text] == []


def test_overrides_win_and_reach_into_pools(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("port: 9000\ndecode:\n  nodes: 3\n  kv_mib: 64\n")
    settings = load_settings(path, {"port": 0, "decode.nodes": 2})
    assert (settings.port, settings.decode.nodes, settings.decode.kv_mib) == (0, 2, 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decode:\n  nodez: 2\n", "decode.nodez"),
        ("port: 70000\n", "port"),
        ("dtype: int3\n", "dtype"),
        ("- a\n- b\n", "mapping"),
        ("port: [1\n", "not YAML"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        load_settings(path, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.yaml"):
        load_settings(tmp_path / "nothing.yaml", {})


def test_threads_share_the_cores() -> None:
    settings = load_settings(None, {"prefill.threads": 3})
    assert settings.threads_of(settings.prefill) == 3
    assert settings.threads_of(settings.decode) >= 1
