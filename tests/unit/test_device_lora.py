"""The adapter table, and what it adds to the layers of a small model, whatever shape the model's tokens have."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapter import save_adapter, tensors_of
from torch import Tensor, nn

from device.batch import Span
from device.cpu_linear import can_pack, pack_linears
from device.lora import AdapterTable
from device.lora_step import AdapterLayout, only
from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, UnloadAdapter
from scheduler.contract import DeviceError, Fault

CPU = torch.device("cpu")
LINEARS = {"first": (6, 5), "lm_head": (5, 9)}


class Model(nn.Module):
    """Two layers, and logits of the tokens in `drawn` alone; `spare` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lm_head, self.spare = nn.Linear(6, 5), nn.Linear(5, 9, bias=False), nn.Linear(6, 5)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, x: Tensor, drawn: list[int]) -> Tensor:
        out: Tensor = self.lm_head(self.first(x).flatten(0, -2)[drawn])
        return out


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model()


@pytest.fixture
def table(model: Model, tmp_path: Path) -> AdapterTable:
    table = AdapterTable(model, CPU, torch.float32)
    for seed, name in enumerate("ab"):
        table.apply(LoadAdapter(name, str(save(tmp_path / name, seed))))
    return table


def save(folder: Path, seed: int, size: float = 0.5) -> Path:
    return save_adapter(folder, tensors_of(LINEARS, 2, seed, size), target_modules=["first", "lm_head"])


def merged(model: Model, folder: Path) -> Model:
    """The model with an adapter's product added to its weights."""
    other = Model()
    other.load_state_dict(model.state_dict())
    for name, (down, up) in _pairs(folder).items():
        other.get_submodule(name).weight.add_(up @ down, alpha=2.0)
    return other


def _pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = tensors_of(LINEARS, 2, "ab".index(folder.name))
    return {n: tuple(tensors[f"base_model.model.{n}.lora_{x}.weight"] for x in "AB") for n in LINEARS}  # type: ignore[misc]


def call(table: AdapterTable, model: Model, x: Tensor, rows: list[tuple[str | None, int]]) -> Tensor:
    """One forward call that draws after the last token of each row."""
    step = table.plan(AdapterLayout(tuple(rows), tuple(name for name, _ in rows)))
    with table.applied(step):
        out: Tensor = model(x, _last(rows))
    return out


def _last(rows: list[tuple[str | None, int]]) -> list[int]:
    return [sum(count for _, count in rows[: i + 1]) - 1 for i in range(len(rows))]


LAYOUTS = {
    "packed, neighbours": ((1, 7), [("a", 3), ("a", 1), (None, 2), ("b", 1)]),
    "packed, scattered": ((1, 9), [("a", 2), (None, 1), ("b", 1), ("a", 1), ("b", 2), (None, 1), ("a", 1)]),
    "a batch of one token each": ((5, 1), [("b", 1), ("a", 1), (None, 1), ("b", 1), ("a", 1)]),
    "one sequence": ((1, 4), [("b", 4)]),
    "without a batch dimension": ((3,), [("a", 1), ("b", 1), ("a", 1)]),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_token_gets_its_own_adapter(table: AdapterTable, model: Model, tmp_path: Path, layout: str) -> None:
    shape, rows = LAYOUTS[layout]
    x = torch.randn(*shape, 6)
    hooked = call(table, model, x, rows)
    for name in "ab":
        table.apply(UnloadAdapter(name))
    base = model(x, _last(rows))
    alone = {name: merged(model, tmp_path / name)(x, _last(rows)) for name in "ab"}
    for i, (name, _) in enumerate(rows):
        if name is None:
            assert torch.equal(hooked[i], base[i])
        else:
            torch.testing.assert_close(hooked[i], alone[name][i])
            assert not torch.allclose(hooked[i], base[i])


def test_a_layer_that_is_called_for_some_rows_at_a_time(table: AdapterTable, model: Model) -> None:
    rows: list[tuple[str | None, int]] = [("a", 1), ("b", 2), (None, 1), ("b", 1), ("a", 1)]
    spans = {offset: Span(offset, count, 0, []) for offset, count in ((0, 1), (1, 2), (3, 1), (4, 1), (5, 1))}
    x = torch.randn(1, 6, 6)
    layout = AdapterLayout(tuple(rows), ())
    with table.applied(table.plan(layout)):
        whole = model.first(x)
        model.lm_head(x[0, :0, :5])
    step = table.plan(layout)
    with table.applied(step):
        for order in ([5, 0, 4, 3], [1], [5, 0, 4, 3]):
            tokens = [t for offset in order for t in range(offset, offset + spans[offset].count)]
            with only(step, [spans[offset] for offset in order]):
                torch.testing.assert_close(model.first(x[0, tokens].unsqueeze(1))[:, 0], whole[0, tokens])
        torch.testing.assert_close(model.first(x), whole)
        model.lm_head(x[0, :0, :5])
    with only(None, []):
        model.first(x)


def test_rows_without_a_draw_are_not_in_the_output_layer(table: AdapterTable, model: Model, tmp_path: Path) -> None:
    x = torch.randn(1, 4, 6)
    step = table.plan(AdapterLayout((("a", 3), ("b", 1)), ("b",)))
    with table.applied(step):
        out = model(x, [3])
    torch.testing.assert_close(out, merged(model, tmp_path / "b")(x, [3]))
    with table.applied(table.plan(AdapterLayout((("a", 4),), ()))):
        assert model(x, []).shape == (0, 9)


def test_an_adapter_of_one_layer_beside_those_of_both(table: AdapterTable, model: Model, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "f", tensors_of({"first": (6, 5)}, 2, 4), target_modules=["first"])
    x = torch.randn(1, 3, 6)
    base = model(x, [1, 2])
    table.apply(LoadAdapter("f", str(folder)))
    both = call(table, model, x, [("f", 2), (None, 1)])
    for name in "ab":
        table.apply(UnloadAdapter(name))
    assert torch.equal(call(table, model, x, [("f", 2), (None, 1)]), both)
    assert torch.equal(both[1], base[1])
    assert not torch.allclose(both[0], base[0])


def test_a_call_of_the_base_model_meets_no_adapter(table: AdapterTable, model: Model) -> None:
    x = torch.randn(1, 2, 6)
    assert table.plan(AdapterLayout(((None, 2),), (None,))) is None
    base = call(table, model, x, [(None, 2)])
    call(table, model, x, [("a", 2)])
    assert torch.equal(model(x, [1]), base)


def test_hooks_are_on_adapted_layers_only(table: AdapterTable, model: Model) -> None:
    assert [len(m._forward_hooks) for m in (model.first, model.lm_head, model.spare)] == [1, 1, 0]
    table.apply(UnloadAdapter("a"))
    assert len(model.first._forward_hooks) == 1
    table.apply(UnloadAdapter("b"))
    assert not model.first._forward_hooks
    assert not model.lm_head._forward_hooks


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="this CPU's oneDNN has no bf16")
def test_packed_layers(model: Model, tmp_path: Path) -> None:
    rows: list[tuple[str | None, int]] = [("a", 2), (None, 1), ("a", 2)]
    x = torch.randn(1, 5, 6).bfloat16()
    model.bfloat16()
    pack_linears(model)
    base = model(x, _last(rows))
    table = AdapterTable(model, CPU, torch.bfloat16)
    folder = save_adapter(tmp_path / "a", tensors_of({"lm_head": (5, 9)}, 2, 0), target_modules=["lm_head"])
    table.apply(LoadAdapter("a", str(folder)))
    out = call(table, model, x, rows)
    hidden = model.first(x)[0, [1, 4]]
    down, up = (t.bfloat16() for t in tensors_of({"lm_head": (5, 9)}, 2, 0).values())
    torch.testing.assert_close(out[[0, 2]], base[[0, 2]] + 2.0 * (hidden @ down.T) @ up.T, rtol=0.03, atol=0.03)
    assert torch.equal(out[1], base[1])


def test_an_adapter_that_is_not_loaded(table: AdapterTable) -> None:
    with pytest.raises(DeviceError, match="adapter 'c' is not loaded; loaded: a, b") as caught:
        table.plan(AdapterLayout((("a", 1), ("c", 1)), ()))
    assert caught.value.fault is Fault.FORWARD


def test_a_layer_that_sees_other_tokens(table: AdapterTable, model: Model) -> None:
    with pytest.raises(ValueError, match="first is given 3 of 2 tokens"):
        call(table, model, torch.randn(1, 3, 6), [("a", 2)])
    call(table, model, torch.randn(1, 2, 6), [("a", 2)])
    model(torch.randn(1, 3, 6), [0])


def test_a_layer_that_is_not_called(table: AdapterTable, model: Model, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "s", tensors_of({"spare": (6, 5)}, 2, 0), target_modules=["spare"])
    table.apply(LoadAdapter("s", str(folder)))
    with pytest.raises(ValueError, match="does not call spare"):
        call(table, model, torch.randn(1, 2, 6), [("s", 2)])


def test_load_list_unload(model: Model, tmp_path: Path) -> None:
    table = AdapterTable(model, CPU, torch.float32)
    assert table.apply(ListAdapters()) == ()
    (a,) = table.apply(LoadAdapter("a", str(save(tmp_path / "a", 0))))
    assert a == AdapterFacts("a", a.digest, 2, ("first", "lm_head"))
    _, b = table.apply(LoadAdapter("b", str(save(tmp_path / "b", 1))))
    assert (b.name, b.digest == a.digest) == ("b", False)
    assert table.apply(ListAdapters()) == (a, b)
    assert table.apply(UnloadAdapter("a")) == (b,)
    with pytest.raises(AdapterRefused, match="adapter 'a' is not loaded; loaded: b"):
        table.apply(UnloadAdapter("a"))


def test_loading_again(table: AdapterTable, model: Model, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 6)
    before, out = table.apply(ListAdapters()), call(table, model, x, [("a", 2)])
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert table.apply(LoadAdapter("a", str(tmp_path / "copy"))) == before
    after = table.apply(LoadAdapter("a", str(save(tmp_path / "other", 2))))
    assert (after[0].digest == before[0].digest, after[1]) == (False, before[1])
    assert not torch.allclose(call(table, model, x, [("a", 2)]), out)


def test_a_refused_load_changes_nothing(table: AdapterTable, model: Model, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 6)
    before, out = table.apply(ListAdapters()), call(table, model, x, [("a", 2)])
    broken = save_adapter(tmp_path / "broken", tensors_of({"first": (6, 4)}, 2, 0), target_modules=["first"])
    for name in ("a", "c"):
        with pytest.raises(AdapterRefused, match=r"first.lora_B.weight is \[4, 2\]"):
            table.apply(LoadAdapter(name, str(broken)))
    with pytest.raises(AdapterRefused, match="needs a name"):
        table.apply(LoadAdapter("", str(tmp_path / "a")))
    with pytest.raises(AdapterRefused, match="no command"):
        table.apply("list")  # type: ignore[arg-type]  # what a wrong caller would do
    assert table.apply(ListAdapters()) == before
    assert torch.equal(call(table, model, x, [("a", 2)]), out)


def test_an_adapter_that_does_not_fit(table: AdapterTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    before = table.apply(ListAdapters())
    monkeypatch.setattr(Tensor, "isfinite", fail)
    with pytest.raises(AdapterRefused, match="adapter 'c' does not fit on cpu; unload another"):
        table.apply(LoadAdapter("c", str(tmp_path / "a")))
    assert table.apply(ListAdapters()) == before


def test_the_number_of_adapters_is_bounded(model: Model, tmp_path: Path) -> None:
    table = AdapterTable(model, CPU, torch.float32, max_adapters=2)
    folder = str(save(tmp_path / "a", 0))
    for name in ("a", "b", "a"):
        table.apply(LoadAdapter(name, folder))
    with pytest.raises(AdapterRefused, match="2 adapters are loaded, the most there may be; unload one"):
        table.apply(LoadAdapter("c", folder))
    table.apply(UnloadAdapter("a"))
    assert [facts.name for facts in table.apply(LoadAdapter("c", folder))] == ["b", "c"]
