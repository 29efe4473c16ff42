"""What the adapter_config.json of a peft folder says, as far as it is plain LoRA: y += scaling * (x A^T) B^T.

Source of the matching and scaling rules: peft 0.21, `check_target_module_exists`, `get_pattern_key`, `LoraLayer`.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from scheduler.adapters import AdapterRefused

CONFIG_FILE = "adapter_config.json"
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Labels, and what matters to training alone."""
_INITS_THAT_KEEP_THE_BASE = ("eva", "gaussian", "orthogonal")
_Value = TypeVar("_Value")
_ALL_LINEAR = "all-linear"
_FIRST_LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(?P<layer>\d+)\.")


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide what an adapter computes; they are called what peft calls them."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None

    def targets(self, linears: Iterable[str], head: str | None) -> tuple[str, ...]:
        """Which of the linear layers, by qualified name, the adapter changes; at least one.

        head: the name of the output layer. Raises AdapterRefused when one of `target_modules` is none of the layers.
        """
        allowed = [name for name in linears if not self._excludes(name)]
        given = self.target_modules
        if isinstance(given, str):
            names_of = {given: [name for name in allowed if _matches(given, name, head)]}
        else:
            names_of = {target: [name for name in allowed if self._is_target(name, target)] for target in given}
        unknown = [target for target, names in names_of.items() if not names]
        if unknown or not names_of:
            raise AdapterRefused(
                f"target_modules: {', '.join(unknown) or 'an empty list'} is no linear layer that the adapter may "
                "change in this model; load an adapter that was trained for it, or correct the list"
            )
        wanted = {name for names in names_of.values() for name in names}
        return tuple(name for name in allowed if name in wanted)

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """What the product of both matrices is multiplied with."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _is_target(self, name: str, target: str) -> bool:
        """A full name is meant wherever it is; the end of a name only in the layers to transform."""
        return name == target or (name.endswith(f".{target}") and self._in_layers(name))

    def _excludes(self, name: str) -> bool:
        if isinstance(self.exclude_modules, str):
            return bool(self.exclude_modules) and re.fullmatch(self.exclude_modules, name) is not None
        return any(name == other or name.endswith(f".{other}") for other in self.exclude_modules or ())

    def _in_layers(self, name: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        found = self._layer_number(name)
        return found is not None and found in (layers if isinstance(layers, list) else [layers])

    def _layer_number(self, name: str) -> int | None:
        patterns = _listed(self.layers_pattern)
        found = None if patterns else _FIRST_LAYER_NUMBER.match(name)
        for pattern in patterns:
            found = found or re.match(_in_layer_list(pattern), name)
        return int(found["layer"]) if found else None


def read_config(folder: Path, max_rank: int) -> LoraConfig:
    """The configuration of the adapter in `folder`. Raises AdapterRefused, naming the field."""
    fields = _read_fields(folder)
    if fields.get("peft_type") != "LORA":
        raise AdapterRefused(f"peft_type is {fields.get('peft_type')!r}; only LORA adapters can be loaded")
    _refuse_what_we_lack(fields)
    try:
        config = msgspec.convert(fields, LoraConfig)
    except msgspec.ValidationError as error:
        raise AdapterRefused(f"{CONFIG_FILE}: {error}; it must be as peft writes it") from error
    _check_patterns(config)
    _check_ranks(config, max_rank)
    return config


def _read_fields(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterRefused(f"no folder {folder}; give the path of a folder that peft's save_pretrained wrote")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise AdapterRefused(
            f"{path} cannot be read ({error.strerror}); the folder must be one in peft format"
        ) from error
    except msgspec.MsgspecError as error:
        raise AdapterRefused(f"{path} is not the JSON object that peft writes: {error}") from error


def _refuse_what_we_lack(fields: dict[str, Any]) -> None:
    for name, value in sorted(fields.items()):
        if not _is_plain(name, value):
            raise AdapterRefused(
                f"{name} is {value!r}, which is more than plain LoRA; serve the merged model "
                "(peft's merge_and_unload), or train the adapter without it"
            )


def _is_plain(name: str, value: Any) -> bool:
    """A field that is not known here must be off, since it may change what the adapter computes."""
    if name == "bias":
        return bool(value == "none")
    if name == "init_lora_weights":
        return value is None or isinstance(value, bool) or value in _INITS_THAT_KEEP_THE_BASE
    return name in _WITHOUT_EFFECT or name in LoraConfig.__struct_fields__ or not value


def _check_patterns(config: LoraConfig) -> None:
    used = [
        *(("target_modules", target, target) for target in [config.target_modules] if isinstance(target, str)),
        *(("exclude_modules", other, other) for other in [config.exclude_modules] if isinstance(other, str)),
        *(("layers_pattern", pattern, _in_layer_list(pattern)) for pattern in _listed(config.layers_pattern)),
        *(("rank_pattern", key, _at_the_end(key)) for key in config.rank_pattern or ()),
        *(("alpha_pattern", key, _at_the_end(key)) for key in config.alpha_pattern or ()),
    ]
    for field, given, pattern in used:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterRefused(f"{field}: {given!r} is no regular expression that fits: {error}") from error
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        raise AdapterRefused("layers_to_transform goes with a list of target_modules; put the layers into the pattern")


def _check_ranks(config: LoraConfig, max_rank: int) -> None:
    by_pattern = {f"rank_pattern {key!r}": rank for key, rank in (config.rank_pattern or {}).items()}
    for field, rank in {"r": config.r, **by_pattern}.items():
        if not 1 <= rank <= max_rank:
            raise AdapterRefused(f"{field} is {rank}; ranks from 1 to {max_rank} can be loaded")


def _matches(pattern: str, name: str, head: str | None) -> bool:
    if pattern.lower() == _ALL_LINEAR:
        return name != head
    return re.fullmatch(pattern, name) is not None


def _by_pattern(pattern: dict[str, _Value] | None, module: str, default: _Value) -> _Value:
    """The value of the first key that matches the end of the name."""
    for key, value in (pattern or {}).items():
        if re.match(_at_the_end(key), module):
            return value
    return default


def _at_the_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _in_layer_list(pattern: str) -> str:
    return rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\."


def _listed(patterns: str | list[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) and patterns else list(patterns or ())
