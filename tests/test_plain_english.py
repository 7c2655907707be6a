"""The guard for plain English finds unusual sentences and accepts ordinary ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PATTERNS = [
    line.partition("\t")[2]
    for line in (Path(__file__).parents[1] / "scripts/plain-english.txt").read_text("utf-8").splitlines()
    if "\t" in line
]


def hits(text: str) -> int:
    return sum(len(re.findall(pattern, text)) for pattern in PATTERNS)


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ("Open streams that are closed on nothing", "Reopen closed standard streams on /dev/null"),
        ("What no machine can do was refused as the spec was read", "Return this machine's problems"),
        ("of several the one that is filled up least", "Pick the tile with the least padding"),
        ("a section that a cell before it has alike", "Reuse identical sections of earlier cells"),
        ("params is nothing that ddp has", "ddp does not support `offload: params`"),
        ("Its speed is then nobody's", "The timing is not valid"),
        ("Cells that are the run of another", "Duplicate cells"),
        ("by a rename, which the disk does once", "atomically (rename)"),
        ("of one run a row no ratio is more than likely", "Ratios based on a single run are marked 'likely'"),
        ("lengths: drawn to the mean length", "sample lengths: random, mean 117 tokens (japanese-alpaca)"),
        ("left out for want of width: energy", "hidden columns: energy (use --wide)"),
        ("cannot tell: the baseline learned nothing", "inconclusive: the loss did not fall"),
        ("a sentence with a way out", "an error message with a fix"),
    ],
)
def test_guard_finds_odd_sentences_only(odd, plain):
    assert hits(odd)
    assert not hits(plain)
