"""Which layers an adapter changes and how much, from its configuration; and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from device.lora_config import LoraConfig, read_config
from scheduler.adapters import AdapterRefused

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LINEARS = tuple(f"model.layers.{i}.{m}" for i in (0, 1, 11) for m in ("attn.q_proj", "attn.v_proj", "mlp.up_proj"))
ALL = (*LINEARS, "lm_head")


def read(folder: Path, **fields: Any) -> LoraConfig:
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | fields))
    return read_config(folder, max_rank=64)


def layers(*numbers: int, module: str = "attn.q_proj") -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.{module}" for i in numbers)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"target_modules": ["q_proj"]}, layers(0, 1, 11)),
        ({"target_modules": ["lm_head"]}, ("lm_head",)),
        ({"target_modules": ["roj", "q_proj", "model.layers.1.mlp.up_proj"]}, None),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, layers(1, module="mlp.up_proj")),
        ({"target_modules": r".*\.1\.attn\..*_proj"}, (*layers(1), *layers(1, module="attn.v_proj"))),
        ({"target_modules": r"layers\.1"}, None),
        ({"target_modules": "all-linear"}, LINEARS),
        ({"layers_to_transform": 1}, layers(1)),
        ({"layers_to_transform": [0, 11]}, layers(0, 11)),
        ({"layers_to_transform": []}, layers(0, 1, 11)),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, layers(1)),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, layers(1)),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, None),
        ({"layers_to_transform": [7]}, None),
        ({"target_modules": [*layers(0), "up_proj"], "layers_to_transform": [1]},
         (*layers(0), *layers(1, module="mlp.up_proj"))),
        ({"exclude_modules": ["layers.1.attn.q_proj"]}, layers(0, 11)),
        ({"exclude_modules": r".*\.1\..*"}, layers(0, 11)),
        ({"exclude_modules": ""}, layers(0, 1, 11)),
        ({"exclude_modules": ["q_proj"]}, None),
        ({"target_modules": []}, None),
    ],
)  # fmt: skip
def test_targets(tmp_path: Path, fields: dict[str, Any], wanted: tuple[str, ...] | None) -> None:
    config = read(tmp_path, **fields)
    if wanted is None:
        with pytest.raises(AdapterRefused, match=r"target_modules: .* no linear layer"):
            config.targets(ALL, head="lm_head")
    else:
        assert config.targets(ALL, head="lm_head") == wanted


def test_the_unknown_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match="target_modules: c_attn is no linear layer"):
        read(tmp_path, target_modules=["q_proj", "c_attn"]).targets(ALL, None)


def test_ranks_and_scalings(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        rank_pattern={"layers.1.attn.q_proj": 16, r"^model\.layers\.0\..*": 2, ".*_proj": 8},
        alpha_pattern={"v_proj": 1},
    )
    ranks = {name: config.rank(name) for name in ("lm_head", *layers(0, 1, 11))}
    assert list(ranks.values()) == [4, 2, 16, 8]
    assert [config.scaling(name) for name in layers(0, 1, 11)] == [8 / 2, 8 / 16, 8 / 8]
    assert config.scaling("model.layers.0.attn.v_proj") == 1 / 2
    assert config.scaling("lm_head") == 8 / 4
    assert read(tmp_path, r=3, use_rslora=True).scaling("lm_head") == 8 / math.sqrt(3)


def test_what_peft_writes_besides_does_not_matter(tmp_path: Path) -> None:
    read(
        tmp_path, task_type="CAUSAL_LM", lora_dropout=0.1, inference_mode=True, base_model_name_or_path="a/b",
        megatron_core="megatron.core", init_lora_weights="gaussian", loftq_config={}, modules_to_save=None,
        use_dora=False, fan_in_fan_out=False, some_later_field=None, bias="none", rank_pattern=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"bias": "all"}, "bias is 'all', which is more than plain LoRA; serve the merged model"),
        ({"bias": None}, "bias is None"),
        ({"use_dora": True}, "use_dora is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"some_later_field": 1}, "some_later_field is 1"),
        ({"r": 0}, "r is 0; ranks from 1 to 64"),
        ({"r": 65}, "r is 65; ranks from 1 to 64"),
        ({"rank_pattern": {"q_proj": 65}}, "rank_pattern 'q_proj' is 65"),
        ({"r": "4"}, r"r`"),
        ({"r": True}, r"r`"),
        ({"lora_alpha": None}, r"lora_alpha`"),
        ({"target_modules": None}, r"target_modules`"),
        ({"target_modules": [1]}, r"target_modules"),
        ({"target_modules": "(q_proj"}, r"target_modules: '\(q_proj' is no regular expression"),
        ({"exclude_modules": "*"}, "exclude_modules: '\\*' is no regular"),
        ({"rank_pattern": {"(?i)q": 4}}, "rank_pattern: .* is no regular"),
        ({"alpha_pattern": {"[": 4}}, "alpha_pattern: .* is no regular"),
        ({"layers_pattern": "(?P<layer>h)"}, "layers_pattern: .* is no regular"),
        ({"target_modules": "q_proj", "layers_to_transform": [1]}, "layers_to_transform goes with a list"),
    ],
)
def test_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterRefused, match=message):
        read(tmp_path, **fields)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    with pytest.raises(AdapterRefused, match="target_modules"):
        read_config(tmp_path, 64)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"r": NaN}', b'{"lora_alpha": 1e999}', b"\xff{}"])
def test_a_configuration_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterRefused, match="not the JSON object"):
        read_config(tmp_path, 64)


def test_no_folder_and_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"no folder .*absent; give the path"):
        read_config(tmp_path / "absent", 64)
    with pytest.raises(AdapterRefused, match=r"adapter_config.json cannot be read \(No such file"):
        read_config(tmp_path, 64)
