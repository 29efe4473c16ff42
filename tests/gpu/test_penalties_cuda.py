"""Penalties on CUDA are those of a CPU, and the host waits for nothing."""

import random
from collections.abc import Iterator

import pytest
import torch

from device.draws import Drawn
from device.penalties import Penalties
from scheduler.contract import Draw
from scheduler.effects import NO_SLOT
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARY, POSITIONS, SLOTS, ROWS = 5000, 512, 6, 8
DRAW = Draw(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def steps() -> Iterator[tuple[list[Drawn], torch.Tensor]]:
    """Rows with and without a slot that go on, fed every other step, and the ids that are fed."""
    rng = random.Random(0)
    known = [[rng.randrange(50) for _ in range(rng.randint(1, 300))] for _ in range(ROWS)]
    for number in range(20):
        fed = [rng.randrange(50) for _ in known]
        yield (
            [
                Drawn(RequestId(f"r{i}"), DRAW, own, len(own), 5, i if i < SLOTS else NO_SLOT, number % 2 == 1)
                for i, own in enumerate(known)
            ],
            torch.tensor(fed),
        )
        for own, token in zip(known, fed, strict=True):
            own.append(token)


def test_they_equal_those_of_a_cpu() -> None:
    on_cuda = Penalties(SLOTS, VOCABULARY, POSITIONS, torch.device("cuda"))
    on_cpu = Penalties(SLOTS, VOCABULARY, POSITIONS, torch.device("cpu"))
    for number, (rows, fed) in enumerate(steps()):
        scores = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(number))
        there = scores.cuda()
        on_cpu.apply(scores, rows, fed)
        on_cuda.apply(there, rows, fed.cuda())
        torch.testing.assert_close(there.cpu(), scores, rtol=1e-6, atol=1e-6)
        if number == 9:
            for penalties in (on_cpu, on_cuda):
                penalties.zero(2)


def test_the_host_waits_for_nothing(no_waiting: None) -> None:
    penalties = Penalties(SLOTS, VOCABULARY, POSITIONS, torch.device("cuda"))
    scores = torch.zeros(ROWS, VOCABULARY, device="cuda")
    cells = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    for rows, _ in steps():
        penalties.apply(scores, rows, cells)
