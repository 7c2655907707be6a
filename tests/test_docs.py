"""The README is read in a few minutes, and what it leaves to pages is found there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text("utf-8")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_reached_from_the_readme(page):
    assert f"](docs/{page.name})" in README


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    links = LINK.findall(page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_tree_of_the_readme_is_what_lies_there():
    tree = README.partition("src/ftbench/\n")[2].partition("```")[0]
    named = [name for line in tree.splitlines() for name in re.findall(r"^  ((?:[a-z_]+(?:\.py|/) ?)+)", line)]
    found = {name for words in named for name in words.split()}
    inside = {f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / "src" / "ftbench").iterdir()}
    assert inside - found == {"__init__.py", "__main__.py"} | (inside & {"__pycache__/", "py.typed"})
    assert found - inside == set()
