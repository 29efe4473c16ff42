"""From one GGUF file to a folder of safetensors, config, tokenizer and generation defaults."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from device.errors import ModelUnsupported
from device.quiet import no_progress_bars

CONVERTED_DTYPE = torch.bfloat16
"""Dequantised weights are stored in the dtype that is served by default; half the size of float32."""


def convert_gguf(gguf: Path, into: Path) -> None:
    """Write the model of file `gguf` into folder `into`, dequantised to CONVERTED_DTYPE.

    Raises ModelUnsupported when transformers cannot read the file.
    """
    no_progress_bars()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=CONVERTED_DTYPE,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # a damaged file can make its parsers raise anything
        raise ModelUnsupported(f"{gguf.name}: transformers cannot read this GGUF file: {error}") from error
    _generation_config(loaded, tokenizer).save_pretrained(into)
    _plain_copy(loaded).save_pretrained(into)
    tokenizer.save_pretrained(into)
    for weights in into.glob("*.safetensors"):
        weights.chmod(0o644)


def _plain_copy(loaded: Any) -> Any:
    """The same model without its GGUF past: `save_pretrained` refuses a model that was loaded from GGUF."""
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _generation_config(loaded: Any, tokenizer: Any) -> GenerationConfig:
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GenerationConfig.from_model_config(loaded.config)
    for key, value in ids.items():
        setattr(config, key, value)
    return config
