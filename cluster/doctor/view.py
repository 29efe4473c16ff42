"""A report as text and as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.doctor.finding import Finding, Level, Report, Section

_STYLES = {Level.OK: "green", Level.NOTE: "dim", Level.SLOW: "yellow", Level.BROKEN: "bold red"}


def report_view(report: Report) -> Group:
    return Group(*(_section(section) for section in report.sections), _verdict(report))


def report_json(report: Report) -> dict[str, Any]:
    """See docs/architecture.md, Doctor."""
    return {
        "exit_status": report.exit_status,
        "sections": [
            {"name": section.name, "findings": [_plain(finding) for finding in section.findings]}
            for section in report.sections
        ],
        "facts": report.facts,
    }


def _plain(finding: Finding) -> dict[str, str]:
    return {**asdict(finding), "level": finding.level.value}


def _section(section: Section) -> Table:
    table = Table(title=section.name, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in section.findings:
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), _text(finding))
    return table


def _text(finding: Finding) -> Text:
    text = Text.assemble((finding.title, "bold"), f". {finding.what}")
    if finding.what_to_do:
        text.append(f"\n-> {finding.what_to_do}")
    return text


def _verdict(report: Report) -> Text:
    counts = [
        f"{count} {level.value}"
        for level in (Level.BROKEN, Level.SLOW)
        if (count := sum(finding.level is level for finding in report.bad))
    ]
    return Text(f"To fix: {', '.join(counts)}." if counts else "All fine.")
