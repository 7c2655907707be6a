"""The estimates next to published figures: docs/evidence/published.md."""

import importlib.util
from importlib.machinery import SourceFileLoader
from statistics import median

import pytest

from ftbench.facts import read_facts


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("published_table", "scripts/published-table")
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def blocks(script):
    return [(block, script.rows_of(block)) for block in read_facts(str(script.SOURCE))]


def test_the_page_is_current(script):
    assert script.PAGE.read_text("utf-8") == script.page()


def test_nine_tenths_of_the_figures_are_inside_their_range(blocks):
    inside = [row.inside for _, rows in blocks for row in rows]
    assert len(inside) >= 110
    assert sum(inside) >= 0.9 * len(inside)


def test_the_founding_table_is_predicted(script, blocks):
    """No cell that ran "does not fit", dense cells are close, and the slower card is never called the faster one."""
    rows = next(rows for block, rows in blocks if block.get("earlier"))
    assert [row.name for row in rows if row.kind == "fits" and not row.inside] == []
    dense = [abs(row.error) for row in rows if row.kind == "run" and row.name[1].startswith("Qwen")]
    assert len(dense) == 4
    assert median(dense) <= 0.15
    assert max(dense) <= 0.4
    verdicts = [line.split(" | ")[-2:] for line in script.pairs(rows).splitlines()[2:]]
    assert len(verdicts) == 4
    for published, estimated in verdicts:
        assert "not certain" in estimated or published.split(",")[0] == estimated.strip(" |")
