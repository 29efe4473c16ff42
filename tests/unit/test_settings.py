"""Settings: the shipped file is the defaults, overrides win, errors name the field."""

from pathlib import Path
from typing import get_args

import pytest

from cluster.launch import _node_config
from cluster.settings import PoolSettings, Settings, SettingsError, configs_folder, load_settings
from device.models import ModelFolder
from scheduler.policies import QUEUE_POLICIES, VICTIM_POLICIES, Preemption, SchedulingPolicy


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
        ("prefill:\n  policy: lifo\n", r"prefill\.policy: .*'shortest-prefill'"),
        ("decode:\n  victim: me\n", r"decode\.victim: .*'lowest-priority'"),
        ("decode:\n  preemption: swap\n", r"decode\.preemption: .*'spill'"),
        ("decode:\n  preemption: spill\n", "^decode: preemption is spill, but spill_mib is 0.*set spill_mib"),
        ("decode:\n  immunity_tokens: -1\n", r"decode\.immunity_tokens"),
        ("limits:\n  lease_s: 0\n", r"limits\.lease_s"),
        ("limits:\n  max_holds: 0\n", r"limits\.max_holds"),
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


def test_every_policy_of_the_scheduler_can_be_chosen() -> None:
    def choices(name: str) -> tuple[str, ...]:
        return get_args(PoolSettings.model_fields[name].annotation)

    assert choices("policy") == QUEUE_POLICIES
    assert choices("victim") == tuple(VICTIM_POLICIES)
    assert choices("preemption") == tuple(how.value for how in Preemption)


def test_scheduling_settings_reach_the_node() -> None:
    overrides: dict[str, object] = {
        "decode.policy": "priority",
        "decode.preemption": "spill",
        "decode.victim": "fewest-outputs",
        "decode.immunity_tokens": 5,
        "decode.spill_mib": 3,
        "decode.spill_path": "/spill",
        "limits.max_holds": 7,
        "limits.lease_s": 2.5,
    }
    settings = load_settings(None, overrides)
    model = ModelFolder("m", Path("/m"))
    config = _node_config("decode", 0, settings, settings.decode, model, b"secret")
    assert config.policy == SchedulingPolicy("priority", Preemption.SPILL, "fewest-outputs", immunity_tokens=5)
    assert (config.device.spill_bytes, config.device.spill_path) == (3 << 20, "/spill")
    assert (config.max_holds, config.lease_s) == (7, 2.5)
    config = _node_config("prefill", 0, settings, settings.prefill, model, b"secret")
    assert (config.policy, config.device.spill_bytes) == (SchedulingPolicy(), 0)


def test_room_for_spilling_is_not_taken_unless_it_is_used() -> None:
    settings = load_settings(None, {"decode.spill_mib": 8})
    assert settings.decode.spill_bytes == 0


def test_threads_share_the_cores() -> None:
    settings = load_settings(None, {"prefill.threads": 3})
    assert settings.threads_of(settings.prefill) == 3
    assert settings.threads_of(settings.decode) >= 1
