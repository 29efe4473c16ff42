"""The load client's workload and arithmetic."""

import math

import numpy as np
import pytest

from benchmarks.serve import Lengths, Outcome, Workload, make_jobs, percentile, summarize


def workload(**fields: object) -> Workload:
    defaults: dict[str, object] = {
        "n_requests": 50,
        "input_length": Lengths.parse("uniform:3:9"),
        "output_length": Lengths.parse("lognormal:20:0.5"),
        "prefix_length": 0,
        "token_ids": None,
        "request_rate": math.inf,
        "seed": 1,
    }
    return Workload(**(defaults | fields))  # type: ignore[arg-type]  # a test's short-hand


def test_a_seed_fixes_the_workload() -> None:
    assert make_jobs(workload()) == make_jobs(workload())
    assert make_jobs(workload()) != make_jobs(workload(seed=2))


def test_lengths_are_as_asked() -> None:
    jobs = make_jobs(workload(n_requests=400))
    assert {len(str(job.prompt).split()) for job in jobs} == set(range(3, 10))
    outputs = sorted(job.max_tokens for job in jobs)
    assert 17 <= outputs[200] <= 23
    assert outputs[0] >= 1


def test_prompts_share_their_prefix() -> None:
    jobs = make_jobs(workload(prefix_length=5, token_ids=(10, 20)))
    assert len({tuple(job.prompt[:5]) for job in jobs}) == 1
    assert all(10 <= int(token) < 20 for job in jobs for token in job.prompt)


def test_arrivals_have_the_asked_rate() -> None:
    starts = [job.start_s for job in make_jobs(workload(n_requests=2000, request_rate=10.0))]
    assert starts == sorted(starts)
    assert 8 <= len(starts) / starts[-1] <= 12
    assert {job.start_s for job in make_jobs(workload())} == {0.0}


@pytest.mark.parametrize("text", ["0", "x", "uniform:5", "uniform:5:4", "lognormal:0:1", "normal:1:2", ""])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Lengths.parse(text)


@pytest.mark.parametrize("p", [0, 50, 90, 99, 100])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_percentiles_are_numpys(n: int, p: int) -> None:
    values = sorted(float(i * i % 37) for i in range(n))
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)))


def test_failures_stay_out_of_the_latencies() -> None:
    good = Outcome(0.0, ttft_s=0.1, end_to_end_s=0.5, prompt_tokens=4, output_tokens=3, gaps_s=[0.2, 0.2])
    bad = Outcome(0.0, ttft_s=9.0, error="status 500", output_tokens=7)
    summary = summarize([good, bad], 2.0)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (2, 1, 3)
    assert summary["ttft_ms"]["p99"] == pytest.approx(100)
    assert summary["time_per_output_token_ms"]["p50"] == pytest.approx(200)
    assert summary["output_tokens_per_s"] == pytest.approx(1.5)
    assert summary["failures"] == ["status 500"]


def test_a_run_without_successes_has_no_latencies() -> None:
    assert summarize([Outcome(0.0, error="x")], 1.0)["ttft_ms"] is None
