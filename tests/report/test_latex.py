"""LaTeX: a booktabs table in which no character of a name acts."""

from __future__ import annotations

import re

import pytest
from page_runs import JAPANESE, study

from ftbench.report.data.collect import collect
from ftbench.report.render.document import Report, Table
from ftbench.report.render.formats import render
from ftbench.report.render.latex import escape, latex


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("50 %", r"50 \%"), ("a_b", r"a\_b"), ("R&D #1", r"R\&D \#1"), ("$x^2$", r"\$x\textasciicircum{}2\$"),
        (r"\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"), ("~20", r"\textasciitilde{}20"),
        ("日本語", "日本語"), ("a--b", "a-{}-b"), ("[x]*", "{[}x{]}{*}"), ("two\nlines\x07\u202e", "two lines"),
        ("<b>|", r"\textless{}b\textgreater{}\textbar{}"), ('"`', r"\char34{}\textasciigrave{}"), ("≈", r"$\approx$"),
    ],
)  # fmt: skip
def test_text_is_set_as_it_reads(text, safe):
    assert escape(text) == safe


def table(rows: int) -> Table:
    return Table({"GPU": "H_100"}, ["method", "step"], [["lora & co", "1.0 %"]] * rows, ["note_1"])


def test_a_table_has_its_rules_its_caption_and_its_notes():
    text = latex(table(2), "foot & note")
    assert r"\begin{tabular}{lr}" in text
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    assert r"\caption{GPU H\_100}" in text
    assert r"foot \& note" in text
    assert r"note\_1" in text
    assert text.count(r"lora \& co & 1.0 \% \\") == 2


def test_a_long_table_goes_over_pages():
    text = latex(table(100))
    assert r"\begin{longtable}{lr}" in text
    assert text.count(r"\end{longtable}") == 1
    assert r"\begin{table}" not in text


def test_every_row_of_a_report_has_the_same_columns(tmp_path):
    text = render(Report(collect([study(tmp_path)])), "latex")
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len(rows) == 1 + 9
    assert len({len(re.findall(r"(?<!\\)&", row)) for row in rows}) == 1
    assert JAPANESE in text
    assert "<script>" not in text
