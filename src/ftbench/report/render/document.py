"""What a report consists of, for any renderer: sections, each with a table, words and flat records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.report.render.tables import Table


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. `key` names it for programs; `records` is what the table shows, in full and as plain
    numbers (unknown is None); a section may have words only. `pictures` are SVG elements, their text escaped, for a
    page."""

    key: str
    title: str
    table: Table | None = None
    paragraphs: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    pictures: Sequence[str] = ()
