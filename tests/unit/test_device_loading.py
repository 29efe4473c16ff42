import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hybrids import SIZES, save_hybrid
from torch import nn
from transformers import (
    BambaConfig,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    T5Config,
)
from transformers.models.bamba import modeling_bamba

from device.cpu_linear import PackedLinear, can_pack, pack_linears
from device.digest import model_digest
from device.errors import ModelUnsupported
from device.loading import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
CPU = torch.device("cpu")


def llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(SMALL | changes))).save_pretrained(folder)
    return folder


def test_a_model_says_what_it_is(tmp_path: Path) -> None:
    model = load_model(llama(tmp_path, head_dim=4), "cpu", "fp32")
    assert (model.layers, model.kv_heads, model.head_dim) == (2, 1, 4)
    assert (model.vocab_size, model.max_positions) == (40, 32)
    assert (model.device, model.dtype) == (CPU, torch.float32)
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: T5Config(), "an encoder-decoder"),
        (lambda: DeepseekV3Config(), "multi-head latent attention"),
        (lambda: MambaConfig(), "no attention layers"),
        (lambda: FalconH1Config(), "layers of type hybrid"),
        (lambda: BambaConfig(attn_layer_indices=[3], time_step_limit=(0.0, 0.1)), "a limit on time steps"),
        (
            lambda: LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            ),
            "rotary embeddings of type dynamic",
        ),
    ],
)
def test_unsupported_configurations_are_named(config: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load_model(tmp_path, "cpu", "fp32")


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2))


def gpt_oss() -> Any:
    small = SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**small, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))


def jamba() -> Any:
    return JambaForCausalLM(JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(bloom, "[Bb]loom"), (gpt_oss, "s_aux"), (jamba, "around JambaMambaMixer 0 hands no arguments down")],
)
def test_what_only_running_it_shows_is_named_too(make: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load_model(tmp_path, "cpu", "fp32")


def test_a_hybrid_says_what_it_keeps(tmp_path: Path) -> None:
    save_hybrid("bamba", tmp_path)
    model = load_model(tmp_path, "cpu", "bf16")
    assert (model.layers, model.attention_layers, model.kv_heads, model.head_dim) == (2, (1, 3), 2, 8)
    assert [kept.layer for kept in model.recurrent] == [0, 2, 4]
    first = model.recurrent[0]
    assert (first.convolution.shape, first.convolution.dtype) == ((88, 4), torch.bfloat16)
    assert (first.recurrent.shape, first.recurrent.dtype) == ((8, 8, 6), torch.float32)


def test_a_plain_model_keeps_nothing_else(tmp_path: Path) -> None:
    model = load_model(llama(tmp_path), "cpu", "fp32")
    assert (model.attention_layers, model.recurrent) == ((0, 1), ())


@pytest.mark.parametrize("function", ["mamba2_chunk_scan", "causal_conv1d_update"])
def test_a_layer_that_forgets_its_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """What transformers did before it passed the states on."""
    own = getattr(modeling_bamba, function)

    def forgetful(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        if function == "causal_conv1d_update":
            args = (torch.zeros_like(args[0]), *args[1:])
        return own(first, *args, **{k: v for k, v in options.items() if k != "initial_states"})

    save_hybrid("bamba", tmp_path)
    monkeypatch.setattr(modeling_bamba, function, forgetful)
    with pytest.raises(ModelUnsupported, match="recurrent layer 0 does not go on from a given state"):
        load_model(tmp_path, "cpu", "fp32")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-the-future"}')
    with pytest.raises(ModelUnsupported, match=r"cannot read its config\.json"):
        load_model(tmp_path, "cpu", "fp32")


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    first, same, other_weights = (llama(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    other_shape = llama(tmp_path / "d", 0, intermediate_size=24)
    other_config = llama(tmp_path / "e", 0, rms_norm_eps=1e-3)
    digests = [model_digest(folder) for folder in (first, other_weights, other_shape, other_config)]
    assert model_digest(same) == digests[0]
    assert len(set(digests)) == 4


def test_the_digest_ignores_who_wrote_the_folder(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    before = model_digest(folder)
    config = json.loads((folder / "config.json").read_text()) | {"transformers_version": "0", "_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    assert model_digest(folder) == before


def test_the_digest_looks_into_every_part_of_the_weights(tmp_path: Path) -> None:
    folder = llama(tmp_path, hidden_size=128, intermediate_size=512)
    path = folder / "model.safetensors"
    weights = path.read_bytes()
    eighth = len(weights) // 8
    digests = {model_digest(folder)}
    for part in range(1, 8):
        middle = bytes(eighth) if part < 7 else bytes(len(weights) - 7 * eighth)
        path.write_bytes(weights[: part * eighth] + middle + weights[part * eighth + len(middle) :])
        digests.add(model_digest(folder))
    assert len(digests) == 8


def test_the_digest_sees_a_changed_tensor_name(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    before = model_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weighs"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    assert model_digest(folder) != before


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="this CPU does not multiply bf16")
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 8, 24), (5, 24), (1, 0, 24), (1, 300, 24)])
def test_packed_linears_compute_the_same(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.Sequential(nn.Linear(40, 8, bias=False))).to(torch.bfloat16)
    rows = torch.randn(shape).to(torch.bfloat16)
    with torch.inference_mode():
        expected = plain(rows)
        pack_linears(plain)
        assert [type(m) for m in plain.modules()].count(PackedLinear) == 2
        torch.testing.assert_close(plain(rows), expected, rtol=0.02, atol=0.02)


def test_only_bf16_on_a_cpu_is_packed() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda:0"), torch.bfloat16)
