"""Tables of text: aligned, folded to the width asked for, and safe to print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ftbench.core.table import text_table


def test_figures_stand_right_and_words_left():
    assert text_table(["GPU", ">watts"], [["H200", "700"], ["RTX 4090", "1,450"]]) == (
        "GPU       watts\nH200        700\nRTX 4090  1,450"
    )


def test_without_headings_there_is_no_row_for_them():
    assert text_table(["", ""], [["step", "1 s"], ["power", "2 W"]]) == "step   1 s\npower  2 W"


def test_words_are_folded_to_the_width_and_figures_never():
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


def test_nothing_moves_the_cursor_or_turns_the_text():
    assert text_table([""], [["a\x1b[31mb\u202ec\nd"]]) == "a[31mbc d"


@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.integers(20, 60))
def test_no_line_is_wider_than_asked_for(words: list[str], width: int):
    text = text_table(["words", ">n"], [[word, "123"] for word in words], width)
    assert all(cell_len(line) <= width for line in text.splitlines())
