"""Every setting with its default; YAML files in `configs/` and command-line options override them."""

import sys
from pathlib import Path
from typing import Literal

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import cluster
from scheduler.policies import Preemption, SchedulingPolicy


class SettingsError(ValueError):
    """The settings are wrong; the message names the field and what it takes."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolSettings(_Model):
    """One pool of nodes. threads: CPU threads of a step, 0 for an equal share of the cores.

    block_size, dtype: of this pool alone, None for those of all. spill_path: a folder, None for host memory.
    policy, preemption, victim, immunity_tokens: see scheduler/policies.py.
    """

    nodes: int = Field(1, ge=1, le=64)
    threads: int = Field(0, ge=0, le=1024)
    block_size: int | None = Field(None, ge=1, le=1024)
    dtype: Literal["auto", "bf16", "fp32"] | None = None
    kv_mib: int = Field(1024, ge=1, description="KV memory of one node")
    max_batch_tokens: int = Field(512, ge=1, description="token budget of one step")
    max_batch_sequences: int = Field(64, ge=1)
    snapshots: int = Field(32, ge=0, description="copies of recurrent state kept for the prefix cache of hybrid models")
    policy: Literal["fifo", "priority", "shortest-prefill"] = "fifo"
    preemption: Literal["none", "recompute", "spill"] = "recompute"
    victim: Literal["last", "fewest-outputs", "lowest-priority"] = "last"
    immunity_tokens: int = Field(16, ge=0, description="sampled after a preemption before the next one")
    spill_mib: int = Field(0, ge=0, description="room of one node for the KV of preempted requests")
    spill_path: str | None = None

    @model_validator(mode="after")
    def _spill_has_room(self) -> "PoolSettings":
        if self.preemption == "spill" and not self.spill_mib:
            raise ValueError(
                "preemption is spill, but spill_mib is 0, so nothing could be saved: "
                "set spill_mib to the MiB that preempted requests may take, or preemption to recompute"
            )
        return self

    @property
    def scheduling(self) -> SchedulingPolicy:
        return SchedulingPolicy(
            queue=self.policy,
            preemption=Preemption(self.preemption),
            victim=self.victim,
            immunity_tokens=self.immunity_tokens,
        )

    @property
    def spill_bytes(self) -> int:
        return self.spill_mib << 20 if self.preemption == "spill" else 0


class Limits(_Model):
    """Bounds on everything that waits or queues."""

    max_requests: int = Field(256, ge=1, description="requests in the cluster before the API answers 429")
    max_holds: int = Field(64, ge=1, description="handoffs under way on one prefill node, the others queue there")
    max_reservations: int = Field(32, ge=1, description="handoffs in flight towards one decode node")
    staging_mib: int = Field(16, ge=0, description="of a decode node, for KV of another block size or dtype")
    layerwise_tokens: int = Field(
        0, ge=0, description="a prompt's last chunk of so many is sent layer by layer; 0: never"
    )
    lease_s: float = Field(60.0, gt=0, description="without the coordinator before a node frees a handoff's blocks")
    action_s: float = Field(60.0, gt=0, description="a node's acknowledgement of one command")
    handoff_s: float = Field(600.0, gt=0, description="from routing to running on the decode node")
    token_s: float = Field(600.0, gt=0, description="the next token of a running request")
    start_s: float = Field(300.0, gt=0, description="start of all nodes, model loading included")
    health_interval_s: float = Field(10.0, gt=0, description="between two looks whether each node answers")
    health_timeout_s: float = Field(30.0, gt=0, description="a node's answer before it counts as lost")
    max_body_bytes: int = Field(8 << 20, ge=1024)


class Settings(_Model):
    model: str = "smollm2"
    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    attention: str = "torch"
    router: Literal["async", "sync"] = "async"
    block_size: int = Field(16, ge=1, le=1024)
    max_model_len: int | None = Field(None, ge=2)
    prefix_caching: bool = True
    transport: str = "ucx"
    order: Literal["destination_first", "source_first"] = "destination_first"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_keys_file: Path | None = None
    cluster_secret_file: Path | None = None
    prefill: PoolSettings = PoolSettings()  # type: ignore[call-arg]
    decode: PoolSettings = PoolSettings()  # type: ignore[call-arg]
    limits: Limits = Limits()  # type: ignore[call-arg]

    def threads_of(self, pool: PoolSettings) -> int:
        if pool.threads:
            return pool.threads
        return max(1, (psutil.cpu_count() or 1) // (self.prefill.nodes + self.decode.nodes))


def load_settings(path: Path | None, overrides: dict[str, object]) -> Settings:
    """Settings from a YAML file and dotted overrides ("decode.nodes": 2). Raises SettingsError.

    path: a file, or the bare name of a shipped one ("serve").
    """
    values: dict[str, object] = {}
    if path is not None:
        values = _read(path)
    for name, value in overrides.items():
        _put(values, name.split("."), value)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(p) for p in e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        ]
        raise SettingsError("; ".join(lines)) from None


def _read(path: Path) -> dict[str, object]:
    shipped = configs_folder() / f"{path}.yaml"
    if not path.exists() and shipped.is_file():
        path = shipped
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"can't read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold a mapping of settings")
    return values


def _put(values: dict[str, object], path: list[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{name} must be a mapping")
        values = child
    values[last] = value


def configs_folder() -> Path:
    """Where the shipped YAML files are: beside the packages in a checkout, under share/ in an installation."""
    checkout = Path(cluster.__file__).parents[1] / "configs"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "prelay" / "configs"
