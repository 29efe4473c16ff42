"""What a client of a hybrid model gets does not depend on the router, nor on snapshots, preemption and spills.

Items 12 and 14 of the conformance checklist, on real models under the real scheduler. A hybrid model never runs ahead.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from device_scenarios import SCENARIOS, Played, play
from tiny_hybrids import build_hybrid, save_hybrid

from device.async_router import AsyncRouter

MODELS = ["bamba", "qwen3-next"]
NAMES = ["late arrivals", "recomputed", "spilled", "prefix hits"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(model: str) -> Path:
        path = tmp_path_factory.mktemp(model)
        save_hybrid(model, path)
        return path

    return saved


@pytest.fixture(scope="module")
def plain(folders: Callable[[str], Path]) -> Callable[[str, str], Played]:
    """One step at a time, from a pool without pressure, and nothing taken from the prefix cache."""

    @cache
    def run(model: str, name: str) -> Played:
        router = build_hybrid(folders(model), total_blocks=80, snapshots=0)
        played = play(replace(SCENARIOS[name], blocks=80), router)
        router.teardown()
        return played

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_items_12_and_14_streams_of_a_hybrid_are_those_of_the_synchronous_router(
    folders: Callable[[str], Path], plain: Callable[[str, str], Played], model: str, name: str
) -> None:
    scenario = SCENARIOS[name]
    router = AsyncRouter(build_hybrid(folders(model), total_blocks=scenario.blocks, spill_bytes=1 << 22))
    played = play(scenario, router)
    router.teardown()
    assert played.streams == plain(model, name).streams
    batcher = played.stepper.scheduler.batcher
    assert batcher.fed_steps == 0
    assert (batcher.pressure.counters.preemptions > 0) == scenario.preempts
    assert (batcher.pressure.counters.restores > 0) == (name == "spilled")
