"""The model store with real pip, real conversions and real processes; no network but for the last test."""

import hashlib
import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from rows import make_row
from transformers import AutoTokenizer, GenerationConfig

from device import models
from device.models import ModelDownloadFailed, ModelError, ModelUnsupported, default_home, resolve_model
from device.router import build_sync_router
from device.wheel_models import SMOLLM2, WheelModel
from scheduler.contract import Draw, Prefill
from scheduler.request import SamplingParams

ROOT = Path(__file__).parents[2]
HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 2, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WAIT_S = 60.0


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A llama of two layers with a byte-level vocabulary."""
    tokens = ["<s>", "</s>", *sorted(set(gguf_bytes()))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(seed)
    for name, shape in tensor_shapes(len(tokens)).items():
        writer.add_tensor(name, rng.normal(scale=0.3, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_bytes() -> list[str]:
    """The characters that byte-level tokenizers write bytes as, and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + i for i in range(256 - len(printable))]
    return [chr(code) for code in (*printable, *others)] + ["ab"]


def tensor_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model in a wheel that pip finds in a folder, in the place of the one that is published."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "prelay_test_model-1.0-py3-none-any.whl"
    info = "prelay_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "prelay_test_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: prelay-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "Apache")
        archive.writestr(f"{info}/RECORD", "")
    model = WheelModel(
        name="smollm2",
        requirement="prelay-test-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="prelay_test_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        size=1,
        notices=(f"{info}/LICENSE", f"{info}/METADATA"),
        origin="made by this test",
    )
    monkeypatch.setattr(models, "SMOLLM2", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return model


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if not path.name.startswith(".lock-"))


def test_a_wheel_becomes_a_folder_once(tiny_wheel: WheelModel, tmp_path: Path) -> None:
    said: list[str] = []
    folder = resolve_model("smollm2", tmp_path / "home", said.append)
    assert [sentence.split()[0] for sentence in said] == ["Downloading", "Converting"]
    assert visible(tmp_path / "home" / "models") == ["smollm2"]
    names = visible(folder.path)
    assert {"config.json", "model.safetensors", "LICENSE", "METADATA", "NOTICE", "generation_config.json"} <= set(names)
    assert not any(name.endswith((".gguf", ".whl")) for name in names)
    started = time.monotonic()
    assert resolve_model("smollm2", tmp_path / "home", said.append) == folder
    assert time.monotonic() - started < 0.1
    assert len(said) == 2


def test_a_converted_folder_has_all_that_serving_needs(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(tiny_gguf), tmp_path, lambda _: None)
    assert folder.name == "tiny"
    config = json.loads((folder.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert GenerationConfig.from_pretrained(folder.path).eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(folder.path)
    text = "ab, hello"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (folder.path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    router = build_sync_router(folder.path, "tiny", "cpu", "fp32", "torch", 4, None, 4, None)
    row = make_row("r", [3, 4, 5], 0, [2], Draw(SamplingParams()))
    (token,) = router.await_result(router.launch(Prefill((row,)))).tokens
    assert token is not None
    assert 0 <= token < config["vocab_size"]


def test_a_gguf_is_known_by_its_content(tiny_gguf: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = resolve_model(str(tiny_gguf), tmp_path, said.append)
    assert resolve_model(str(tiny_gguf), tmp_path, said.append) == first
    assert len(said) == 1
    changed = write_gguf(tmp_path / "tiny.gguf", seed=1)
    assert resolve_model(str(changed), tmp_path, said.append).path != first.path


def test_a_broken_gguf_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_gguf.read_bytes()[:4000])
    with pytest.raises(ModelUnsupported, match=r"broken\.gguf"):
        resolve_model(str(broken), tmp_path / "home", lambda _: None)
    assert visible(tmp_path / "home" / "models") == []


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_download_that_is_not_what_was_pinned_is_refused(
    field: str, tiny_wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: dict[str, Any] = {field: "0" * 64}
    monkeypatch.setattr(models, "SMOLLM2", replace(tiny_wheel, **wrong))
    with pytest.raises(ModelDownloadFailed, match="refused"):
        resolve_model("smollm2", tmp_path / "home", lambda _: None)
    assert visible(tmp_path / "home" / "models") == []


def test_a_wheel_that_pip_cannot_find(tiny_wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelDownloadFailed, match=r"could not fetch prelay-test-model==1\.0.*local model folder"):
        resolve_model("smollm2", tmp_path / "home", lambda _: None)
    assert visible(tmp_path / "home" / "models") == []


SLOW_CONVERSION = """
import sys, time
from pathlib import Path
from device import gguf_conversion, models

convert = gguf_conversion.convert_gguf

def slow(gguf, into):
    convert(gguf, into)
    Path(sys.argv[3]).touch()
    time.sleep(float(sys.argv[4]))

gguf_conversion.convert_gguf = slow
print(models.resolve_model(sys.argv[1], Path(sys.argv[2]), lambda _: None).path)
"""


def resolve_in_process(gguf_file: Path, home: Path, marker: Path, pause_s: float) -> "subprocess.Popen[str]":
    arguments = [str(gguf_file), str(home), str(marker), str(pause_s)]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_CONVERSION, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_conversion_leaves_nothing_that_looks_finished(tiny_gguf: Path, tmp_path: Path) -> None:
    home, marker = tmp_path / "home", tmp_path / "converted"
    process = resolve_in_process(tiny_gguf, home, marker, WAIT_S)
    try:
        wait_until(marker.exists)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT_S)
    assert all(name.startswith(".partial-") for name in visible(home / "models"))
    folder = resolve_model(str(tiny_gguf), home, lambda _: None)
    assert visible(home / "models") == [folder.path.name]


def test_two_processes_at_once_convert_once(tiny_gguf: Path, tmp_path: Path) -> None:
    home, markers = tmp_path / "home", [tmp_path / "first", tmp_path / "second"]
    processes = [resolve_in_process(tiny_gguf, home, marker, 0.5) for marker in markers]
    paths = {process.communicate(timeout=WAIT_S)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1
    assert len([marker for marker in markers if marker.exists()]) == 1
    assert visible(home / "models") == [Path(paths.pop()).name]


def test_smollm2_itself() -> None:
    try:
        folder = resolve_model("smollm2", default_home(), lambda _: None)
    except ModelError as error:
        pytest.skip(f"{SMOLLM2.requirement} cannot be fetched here: {error}")
    tokenizer = AutoTokenizer.from_pretrained(folder.path)
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert GenerationConfig.from_pretrained(folder.path).eos_token_id == tokenizer.eos_token_id == 2
    assert "Apache License" in (folder.path / "LICENSE").read_text()
