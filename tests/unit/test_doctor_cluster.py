"""The doctor on a running server, and the report it makes."""

from typing import Any

import pytest
from doctor_facts import levels, node, only_bad
from rich.console import Console

from cluster.doctor.cluster_checks import check_cluster, check_server_settings, largest_pool, no_server, no_status
from cluster.doctor.finding import Finding, Level, Report, Section
from cluster.doctor.view import report_json, report_view


def status(*changed: dict[str, Any], missing: tuple[str, ...] = ()) -> dict[str, Any]:
    """One prefill and one decode node, replaced by those with the same name in `changed`."""
    nodes = {
        "prefill-0": node("prefill-0", "prefill", "decode-0"),
        "decode-0": node("decode-0", "decode", "prefill-0"),
    }
    nodes.update({line["node"]: line for line in changed})
    return {"nodes": list(nodes.values()), "missing_roles": list(missing)}


def test_nodes_that_are_joined_well() -> None:
    findings = check_cluster(status())
    assert levels(findings) == {Level.OK}
    assert findings[0].what == "prefill-0, decode-0."
    assert findings[1].title == "prefill-0 -> decode-0: cma"


@pytest.mark.parametrize("slow", ["prefill-0", "decode-0"])
def test_a_warning_of_either_end_is_told(slow: str) -> None:
    role, peer = ("prefill", "decode-0") if slow == "prefill-0" else ("decode", "prefill-0")
    finding = only_bad(check_cluster(status(node(slow, role, peer, "tcp", "UCX joins them by TCP."))))
    assert finding.level is Level.SLOW
    assert finding.title == "prefill-0 -> decode-0: cma/tcp"
    assert finding.what == "UCX joins them by TCP."


def test_a_pair_that_is_not_joined() -> None:
    finding = only_bad(check_cluster(status({**node("decode-0", "decode", "prefill-0"), "links": []})))
    assert finding.level is Level.BROKEN
    assert "not joined" in finding.what


def test_fields_that_differ_are_named() -> None:
    other = node("decode-0", "decode", "prefill-0")
    other["compatibility"] |= {"block_size": 32, "model_digest": "n"}
    finding = only_bad(check_cluster(status({**other, "links": []})))
    assert finding.level is Level.BROKEN
    assert "model_digest is m and n; block_size is 16 and 32" in finding.what
    joined = check_cluster(status(other))
    assert [finding.level for finding in joined] == [Level.OK, Level.OK, Level.NOTE]
    assert "block_size is 16 and 32" in joined[2].what


def test_each_pair_has_a_line() -> None:
    second = node("decode-1", "decode", "prefill-0")
    source = node("prefill-0", "prefill", "decode-0")
    source["links"] += [{"peer": "decode-1", "lane": "tcp", "warning": None}]
    titles = [finding.title for finding in check_cluster(status(source, second))[1:]]
    assert titles == ["prefill-0 -> decode-0: cma", "prefill-0 -> decode-1: cma/tcp"]


def test_nodes_that_are_lost_or_silent() -> None:
    lost = only_bad(check_cluster(status({"node": "decode-0", "lost": "it was killed"})))
    assert (lost.level, lost.title) == (Level.BROKEN, "decode-0 is lost")
    assert "it was killed" in lost.what
    silent = only_bad(check_cluster(status({"node": "decode-0", "unreachable": "TimeoutError: "})))
    assert "TimeoutError" in silent.what
    missing = check_cluster({"nodes": [], "missing_roles": ["decode"]})
    assert only_bad(missing).title == "No decode node"


def test_a_server_that_does_not_answer_and_none_at_all() -> None:
    assert only_bad([no_status("http://127.0.0.1:1", "connection refused")]).level is Level.BROKEN
    assert no_server().level is Level.NOTE


def test_settings_that_the_server_was_started_with() -> None:
    assert check_server_settings({}) == []
    assert check_server_settings({"UCX_TLS": "all"}) == []
    finding = only_bad(check_server_settings({"PRELAY_SHARED_POOLS": "n"}))
    assert finding.title == "Settings of the server: Nodes don't read each other's pools"
    assert finding.what_to_do == "Unset PRELAY_SHARED_POOLS. Then restart the server."


def test_the_largest_pool() -> None:
    big = {**node("decode-0", "decode", "prefill-0"), "device": {"total_blocks": 300, "block_bytes": 1 << 20}}
    assert largest_pool(status(big)) == 300 << 20
    assert largest_pool({"nodes": [{"node": "decode-0", "lost": "x"}]}) == 0


@pytest.mark.parametrize(("level", "expected"), [(Level.OK, 0), (Level.NOTE, 0), (Level.SLOW, 1), (Level.BROKEN, 1)])
def test_the_exit_status(level: Level, expected: int) -> None:
    report = Report((Section("one", (Finding(Level.OK, "a", "b"),)), Section("two", (Finding(level, "c", "d"),))), {})
    assert report.exit_status == expected


def test_the_report_as_text_and_as_json() -> None:
    section = Section(
        "UCX", (Finding(Level.OK, "Fine", "It works."), Finding(Level.SLOW, "[tcp]", "It crawls.", "Do."))
    )
    report = Report((section,), {"ucx": None})
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(report_view(report))
    text = captured.get()
    assert "Fine. It works." in text
    assert "slow" in text
    assert "[tcp]. It crawls." in text
    assert "-> Do." in text
    assert text.rstrip().endswith("To fix: 1 slow.")
    assert report_json(report) == {
        "exit_status": 1,
        "sections": [
            {
                "name": "UCX",
                "findings": [
                    {"level": "ok", "title": "Fine", "what": "It works.", "what_to_do": ""},
                    {"level": "slow", "title": "[tcp]", "what": "It crawls.", "what_to_do": "Do."},
                ],
            }
        ],
        "facts": {"ucx": None},
    }
