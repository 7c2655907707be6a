"""Each test that docs/explanation/promises.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "explanation" / "promises.md").read_text("utf-8"))


def test_named_tests_exist():
    assert len(NAMED) > 15
    assert [each for each in NAMED if f"\ndef {each[1]}(" not in (ROOT / each[0]).read_text("utf-8")] == []
