"""The LoRA adapters of a loaded model, and how those that a step's rows name come into its forward call.

A linear layer that some loaded adapter changes gets a forward hook, which adds to the output of the tokens of that
adapter only: the other tokens' outputs are not touched, and without adapters loaded there is no hook.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from device.cpu_linear import PackedLinear
from device.lora_folder import Adapter, LinearShape, read_adapter
from device.lora_step import AdapterLayout, AdapterStep
from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, LoraCommand, UnloadAdapter
from scheduler.contract import DeviceError, Fault

MAX_ADAPTERS = 16
"""How many can be loaded at a time."""
MAX_RANK = 256


class AdapterTable:
    """The adapters that are loaded for a model. The caller changes it only while nobody uses them.

    module: a transformers causal LM on `device`; dtype: that of its packed weights.
    """

    def __init__(self, module: Any, device: torch.device, dtype: torch.dtype, max_adapters: int = MAX_ADAPTERS) -> None:
        self._device, self._max_adapters = device, max_adapters
        self._linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear | PackedLinear)}
        self._shapes = {name: _shape(layer, device, dtype) for name, layer in self._linears.items()}
        output = module.get_output_embeddings()
        self._head = next((name for name, layer in self._linears.items() if layer is output), None)
        self._adapters: dict[str, Adapter] = {}
        self._hooks: dict[str, Any] = {}
        self._step: AdapterStep | None = None

    def apply(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        """Load, unload or list; returns what is loaded then, by name. Raises AdapterRefused; nothing has changed then.

        Loading a name again with equal content does nothing, with other content it replaces the adapter.
        """
        if isinstance(command, LoadAdapter):
            self._load(command)
        elif isinstance(command, UnloadAdapter):
            self._unload(command.name)
        elif not isinstance(command, ListAdapters):
            raise AdapterRefused(f"{command!r} is no command for the adapter table")
        return tuple(self._adapters[name].facts for name in sorted(self._adapters))

    def plan(self, layout: AdapterLayout) -> AdapterStep | None:
        """What `applied` needs for one forward call; None when all its tokens are the base model's.

        Raises DeviceError(FORWARD) when an adapter is not loaded.
        """
        names = layout.names
        for name in sorted(names - self._adapters.keys()):
            raise DeviceError(Fault.FORWARD, f"adapter {name!r} is not loaded; {self._loaded()}")
        if not names:
            return None
        return AdapterStep(layout, {name: self._adapters[name] for name in names}, self._head, self._device)

    @contextmanager
    def applied(self, step: AdapterStep | None) -> Iterator[None]:
        """The forward call inside, which must be the planned one, runs with its adapters. A step serves for one call.

        Raises ValueError when the model does not show an adapted layer all tokens of the call, or does not call it: the
        adapter would be lost without a sign.
        """
        self._step = step
        try:
            yield
        finally:
            self._step = None
        if step is not None and step.unseen:
            raise ValueError(f"the model does not call {min(step.unseen)}, so its adapter cannot be applied")

    def _load(self, command: LoadAdapter) -> None:
        name = command.name
        if not name:
            raise AdapterRefused("an adapter needs a name")
        if name not in self._adapters and len(self._adapters) >= self._max_adapters:
            raise AdapterRefused(f"{self._max_adapters} adapters are loaded, the most there may be; unload one first")
        try:
            adapter = read_adapter(name, Path(command.path), self._shapes, self._head, MAX_RANK)
        except torch.OutOfMemoryError as error:
            raise AdapterRefused(
                f"adapter {name!r} does not fit on {self._device}; unload another one first"
            ) from error
        if name not in self._adapters or self._adapters[name].facts != adapter.facts:
            self._adapters[name] = adapter
            self._set_hooks()

    def _unload(self, name: str) -> None:
        if name not in self._adapters:
            raise AdapterRefused(f"adapter {name!r} is not loaded; {self._loaded()}")
        del self._adapters[name]
        self._set_hooks()

    def _loaded(self) -> str:
        return f"loaded: {', '.join(sorted(self._adapters)) or 'none'}"

    def _set_hooks(self) -> None:
        """A hook on every linear layer that some adapter changes, and on no other."""
        wanted = {name for adapter in self._adapters.values() for name in adapter.layers}
        for name in self._hooks.keys() - wanted:
            self._hooks.pop(name).remove()
        for name in wanted - self._hooks.keys():
            self._hooks[name] = self._linears[name].register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            if self._step is not None:
                self._step.add(name, given[0], out)

        return add


def _shape(layer: Any, device: torch.device, dtype: torch.dtype) -> LinearShape:
    if isinstance(layer, PackedLinear):
        return LinearShape(layer.in_features, layer.out_features, device, dtype)
    return LinearShape(layer.in_features, layer.out_features, layer.weight.device, layer.weight.dtype)
