import csv
import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core import rows
from ftbench.core.rows import COLUMNS, StepRow

FOUNDING = "step,epoch,elapsed_time_sec,progress_ratio,memory_allocated_gb,memory_reserved_gb,peak_memory_gb"

# What nine significant digits keep: floats that a single-precision number can hold, and no line breaks in a text.
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda x: float(format(x, ".9g")))
texts = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1)


def values_of(field: dataclasses.Field) -> st.SearchStrategy:
    """Return a valid value of a column."""
    if str(field.type) == "int | None":
        return st.none() | st.integers(0, rows.MOST_STEPS - 1 if field.name == "step" else 10**12)
    if str(field.type) == "str | None":
        return st.none() | texts
    positive = numbers.map(abs).map(lambda number: number if rows.SMALLEST < number < rows.LARGEST else 0.0)
    return st.none() | (numbers if field.name in rows.SIGNED else positive)


any_row = st.builds(StepRow, **{field.name: values_of(field) for field in dataclasses.fields(StepRow)})


def reread(line):
    (values,) = csv.reader([line])
    return rows.parse(dict(zip(COLUMNS, values, strict=True)))


@settings(max_examples=30)
@given(any_row)
def test_rows_survive_a_round_trip(row):
    line = rows.to_csv(row)
    assert line.count("\n") == 1
    assert reread(line) == row


def test_the_file_begins_with_the_seven_columns_of_the_founding_study():
    assert rows.header().startswith(f"{FOUNDING},rank,phase,step_time_s,")
    assert rows.header().endswith("\n")


def test_unknown_is_an_empty_field_and_zero_is_not():
    assert rows.to_csv(StepRow()) == "," * (len(COLUMNS) - 1) + "\n"
    assert reread(rows.to_csv(StepRow(loss=0.0, samples=0))) == StepRow(loss=0.0, samples=0)


def test_a_nan_loss_is_kept():
    assert math.isnan(reread(rows.to_csv(StepRow(loss=math.nan))).loss)
    assert reread(rows.to_csv(StepRow(loss=math.inf))).loss == math.inf


@pytest.mark.parametrize("values", [{"step": "1.5"}, {"loss": "low"}])
def test_a_value_of_another_type_is_an_error(values):
    with pytest.raises(ValueError, match=r"1\.5|low"):
        rows.parse(values)
