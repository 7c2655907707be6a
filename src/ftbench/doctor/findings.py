"""One thing looked at, and its verdict; as text for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "n/a"]
_NAME = 24


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` works; `warn` works, slower or with figures to doubt; `fail` stands in the way of a run; `n/a` is not there,
    or could not be looked at. `text` is a sentence, with a way out unless it is `ok`."""

    area: str
    name: str
    verdict: Verdict
    text: str


def as_lines(findings: Iterable[Finding], width: int) -> list[str]:
    """Findings grouped by area in the order in which areas first come, a long sentence over several lines of `width`
    characters."""
    areas: dict[str, list[Finding]] = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append(finding)
    lines: list[str] = []
    for area, members in areas.items():
        lines += ["", area]
        for finding in members:
            head = f"  {finding.verdict:<5} {finding.name:<{_NAME}} "
            lines += textwrap.wrap(
                finding.text, max(width, len(head) + 40), initial_indent=head, subsequent_indent=" " * (_NAME + 9),
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return lines[1:]
