"""An adapter's weights: where they end up, what their digest sees, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapter import save_adapter, tensors_of
from torch import Tensor

from device.lora_folder import Adapter, LinearShape, read_adapter
from scheduler.adapters import AdapterFacts, AdapterRefused

CPU = torch.device("cpu")
TARGETS = {"layers.0.q_proj": (6, 5), "layers.0.v_proj": (6, 3)}
A, B = (f"base_model.model.layers.0.q_proj.lora_{x}.weight" for x in "AB")


def shapes(dtype: torch.dtype = torch.float32) -> dict[str, LinearShape]:
    linears = TARGETS | {"layers.0.o_proj": (5, 6), "lm_head": (6, 9)}
    return {name: LinearShape(inputs, outputs, CPU, dtype) for name, (inputs, outputs) in linears.items()}


def read(folder: Path, name: str = "a", dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(name, folder, shapes(dtype), "lm_head", max_rank=8)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return tensors_of(TARGETS, rank=2, seed=1)


def digest(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> str:
    return read(save_adapter(folder, tensors, **fields)).facts.digest


def test_weights_and_facts(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    adapter = read(save_adapter(tmp_path, tensors, alpha_pattern={"v_proj": 1}))
    assert adapter.facts == AdapterFacts("a", adapter.facts.digest, 2, ("q_proj", "v_proj"))
    assert adapter.layers.keys() == TARGETS.keys()
    assert torch.equal(adapter.layers["layers.0.q_proj"].down, tensors[A])
    assert torch.equal(adapter.layers["layers.0.q_proj"].up, tensors[B].T)
    assert [layer.scaling for layer in adapter.layers.values()] == [2.0, 0.5]


def test_weights_take_the_dtype_of_their_layer(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    layer = read(save_adapter(tmp_path, tensors), dtype=torch.bfloat16).layers["layers.0.q_proj"]
    assert torch.equal(layer.down, tensors[A].bfloat16())
    half = {name: tensor.half() for name, tensor in tensors.items()}
    assert torch.equal(read(save_adapter(tmp_path, half)).layers["layers.0.q_proj"].up, half[B].T.float())


def test_weights_do_not_follow_the_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    adapter = read(save_adapter(tmp_path, tensors))
    file = tmp_path / "adapter_model.safetensors"
    with file.open("r+b") as handle:
        handle.write(bytes(file.stat().st_size))
    assert torch.equal(adapter.layers["layers.0.q_proj"].down, tensors[A])


def test_the_digest_is_of_the_content(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    first = digest(tmp_path / "one", tensors)
    assert len(first) == 32
    assert digest(tmp_path / "two", tensors, lora_dropout=0.5, inference_mode=True) == first
    assert digest(tmp_path / "two", tensors, target_modules=r".*\.[qv]_proj") == first
    assert read(tmp_path / "one", name="other").facts.digest == first
    assert read(tmp_path / "one", dtype=torch.bfloat16).facts.digest == first


def test_the_digest_sees_one_weight_and_every_setting_that_counts(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    seen = {digest(tmp_path, tensors), digest(tmp_path, tensors, lora_alpha=5)}
    seen |= {digest(tmp_path, tensors, use_rslora=True), digest(tmp_path, tensors, alpha_pattern={"q_proj": 1})}
    for name in tensors:
        changed = tensors[name].clone()
        changed[-1, -1] += 1e-6
        seen.add(digest(tmp_path, tensors | {name: changed}))
    assert len(seen) == 4 + len(tensors)


def test_ranks_by_layer(tmp_path: Path) -> None:
    tensors = tensors_of({"layers.0.q_proj": (6, 5)}, 7, 1) | tensors_of({"layers.0.v_proj": (6, 3)}, 2, 2)
    adapter = read(save_adapter(tmp_path, tensors, rank_pattern={"q_proj": 7}))
    assert adapter.facts.rank == 7
    assert adapter.layers["layers.0.q_proj"].scaling == 4 / 7


Change = Callable[[dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(B), f"lacks {B}, which target_modules asks for"),
        (lambda t: t.clear(), "lacks .* and 1 more, which"),
        (
            lambda t: t.update(tensors_of({"layers.0.o_proj": (5, 6)}, 2, 1)),
            "has .*o_proj.* belongs to no linear layer",
        ),
        (lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(9, 6)}), "save_embedding_layers"),
        (lambda t: t.update({A: torch.ones(3, 6)}), r"lora_A.weight is \[3, 6\], but .* ask for \[2, 6\]"),
        (lambda t: t.update({A: torch.ones(2, 7)}), r"is \[2, 7\], but"),
        (lambda t: t.update({B: torch.ones(2, 5)}), r"is \[2, 5\], but .* ask for \[5, 2\]"),
        (lambda t: t.update({B: torch.ones(10)}), r"is \[10\], but"),
        (lambda t: t.update({A: torch.ones(2, 6, dtype=torch.int8)}), "lora_A.weight is I8; save it as one of F32"),
        (lambda t: t[B].fill_(float("nan")), f"{B} has values that are not finite"),
        (lambda t: t[A][0, 0].fill_(float("inf")), f"{A} has values that are not finite"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, Tensor], change: Change, message: str) -> None:
    change(tensors)
    with pytest.raises(AdapterRefused, match=message):
        read(save_adapter(tmp_path, tensors))


def test_a_value_too_large_for_the_layers_dtype(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[A][1, 1] = torch.finfo(torch.float32).max
    save_adapter(tmp_path, tensors)
    read(tmp_path)
    with pytest.raises(AdapterRefused, match=r"not finite in torch\.bfloat16"):
        read(tmp_path, dtype=torch.bfloat16)


def test_a_pickle_is_not_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_adapter(tmp_path, tensors)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match=r"adapter_model.bin is a pickle.* safe_serialization=True"):
        read(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterRefused, match=r"no adapter_model.safetensors in .*; save the adapter"):
        read(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_damaged_file(tmp_path: Path, tensors: dict[str, Tensor], kept: int) -> None:
    save_adapter(tmp_path, tensors)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(AdapterRefused, match="is damaged or cannot be read"):
        read(tmp_path)
