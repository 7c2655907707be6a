"""One thing looked at, and its verdict; as text for a person."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ftbench.core.table import text_table

Verdict = Literal["ok", "warn", "fail", "n/a"]
Answer = tuple[Verdict, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` works; `warn` works, slower or with figures to doubt; `fail` stands in the way of a run; `n/a` is not there,
    or could not be looked at. `text` is a sentence, with a way out unless it is `ok`."""

    area: str
    name: str
    verdict: Verdict
    text: str


def answers(area: str, checks: Mapping[str, Callable[..., Answer | None]], *arguments: Any) -> list[Finding]:
    """Return the finding of each check that has an answer, in their order."""
    return [Finding(area, name, *answer) for name, check in checks.items() if (answer := check(*arguments))]


def as_text(findings: Iterable[Finding], width: int | None = None) -> str:
    """Return findings grouped by area in the order in which areas first come, a long sentence over several lines of
    `width` characters, or of the terminal's."""
    areas: dict[str, list[tuple[str, str, str]]] = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append((f"  {finding.verdict}", finding.name, finding.text))
    return "\n\n".join(f"{area}\n{text_table(['', '', ''], rows, width)}" for area, rows in areas.items())
