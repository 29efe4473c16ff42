"""What a device is started with: plain data that travels to the node's process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """model_path: a local folder with config and safetensors. device, dtype, attention: names.

    kv_bytes: memory of the KV pool; block_size in tokens; threads: CPU threads of a step.
    max_model_len: positions, None for what the model and the pool allow.
    spill_bytes: room for the KV of preempted sequences, 0 for none. spill_path: a folder, None for host memory.
    slots, snapshots: see DeviceFacts; a model with recurrent state needs a slot for each sequence that runs or lands.
    staging_bytes: see DeviceFacts; 0 for a node that takes KV only from nodes like itself.
    router: "async" launches a step before the last one is read, "sync" does not.
    """

    model_path: str
    model_name: str
    device: str
    dtype: str
    attention: str
    block_size: int
    kv_bytes: int
    max_model_len: int | None
    threads: int
    spill_bytes: int = 0
    spill_path: str | None = None
    slots: int = 0
    snapshots: int = 0
    staging_bytes: int = 0
    router: str = "async"
