"""Text tables: alignment, wrapping and control characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from ftbench.core.table import text_table


def test_numbers_are_right_aligned():
    assert text_table(["GPU", ">watts"], [["H200", "700"], ["RTX 4090", "1,450"]]) == (
        "GPU       watts\nH200        700\nRTX 4090  1,450"
    )


def test_without_headings_there_is_no_header_row():
    assert text_table(["", ""], [["step", "1 s"], ["power", "2 W"]]) == "step   1 s\npower  2 W"


def test_words_are_wrapped_but_numbers_are_not():
    text = text_table(["why", ">count"], [["no run of this method on this card", "1,234,567,890"]], width=32)
    assert text.splitlines() == [
        "why                        count",
        "no run of this     1,234,567,890",
        "method on this",
        "card",
    ]


def test_wide_characters_take_two_columns():
    lines = text_table(["名前", ">n"], [["学習", "1"], ["ab", "22"]]).splitlines()
    assert {cell_len(line) for line in lines} == {8}


@pytest.mark.parametrize("text", ["[red]x[/red]", ":smile:", "https://example.org/1"])
def test_cells_are_printed_as_they_are(text: str):
    assert text_table([">n"], [[text]]).splitlines()[1] == text


def test_control_characters_are_removed():
    assert text_table([""], [["a\x1b[31mb\u202ec\nd"]]) == "a[31mbc d"


def test_words_of_usual_length_are_not_broken():
    text = text_table(["GPU", "recipe", ">n"], [["H200", "lora: varlen, checkpointing, packing", "1"]], 30)
    assert "checkpointing," in text.split()


@settings(max_examples=30)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.integers(20, 60))
def test_no_line_exceeds_the_width(words: list[str], width: int):
    text = text_table(["words", ">n"], [[word, "123"] for word in words], width)
    assert all(cell_len(line) <= width for line in text.splitlines())
