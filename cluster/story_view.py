"""`prelay story` as lines of text."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any


def story_lines(story: dict[str, Any]) -> Iterator[str]:
    """story: what GET /cluster/story/{request_id} answers. Times are local."""
    width = max((len(line["node"]) for line in story["lines"]), default=0)
    for line in story["lines"]:
        at = datetime.fromtimestamp(line["at"]).isoformat(sep=" ", timespec="milliseconds")
        yield f"{at}  {line['node']:{width}}  step {line['step']}, {line['tokens']} tokens: {line['what']}"
    for node in story["silent"]:
        yield f"{node['node']} does not answer: {node['reason']}"
