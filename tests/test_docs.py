"""The README is read in a few minutes, and what it leaves to pages is found there."""

from __future__ import annotations

import re
import subprocess
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


def test_the_page_of_the_tree_is_what_lies_there():
    subprocess.run([ROOT / "scripts" / "tree", "--check"], check=True)
