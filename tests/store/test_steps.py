import math
import os

import pytest

from ftbench.core.rows import StepRow, header, to_csv
from ftbench.store.steps import StepsWriter, read_steps

ROWS = [
    StepRow(step=1, phase="train", step_time_s=0.5, loss=2.0, grad_norm=1.5, throttle="none"),
    StepRow(step=2, phase="train", step_time_s=0.25, loss=math.inf, grad_norm=math.nan),
    StepRow(step=2, phase="evaluate", step_time_s=9.0, loss=1.0),
    StepRow(step=3, phase="train", loss=1.5),
]


def columns_of(path, names):
    """Return {column name: values} of the training rows."""
    train = [row for row in read_steps(path)[0] if row.phase in ("train", None)]
    return {name: [getattr(row, name) for row in train] for name in names}


@pytest.fixture
def path(tmp_path):
    writer = StepsWriter(tmp_path / "steps.csv")
    writer.append(ROWS)
    writer.close()
    return tmp_path / "steps.csv"


def test_columns_are_those_of_the_training_rows_with_none_for_the_unknown(path):
    columns = columns_of(path, ("step", "step_time_s", "energy_j"))
    assert columns == {"step": [1, 2, 3], "step_time_s": [0.5, 0.25, None], "energy_j": [None] * 3}


def test_a_figure_that_is_no_number_is_not_the_unknown(path):
    columns = columns_of(path, ("loss", "grad_norm"))
    assert columns["loss"] == [2.0, math.inf, 1.5]
    assert columns["grad_norm"][0] == 1.5
    assert math.isnan(columns["grad_norm"][1])
    assert columns["grad_norm"][2] is None


@pytest.mark.parametrize("garbage", ['5,"an open quote', "9" * 40, to_csv(ROWS[0])[:20]])
def test_a_line_that_cannot_be_read_is_in_no_column(path, garbage):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], garbage + "\n", *lines[2:]]))
    assert columns_of(path, ("step", "loss")) == {"step": [1, 2, 3], "loss": [2.0, math.inf, 1.5]}


def test_an_unfinished_line_is_in_no_column(path):
    path.write_text(path.read_text()[:-3])
    assert columns_of(path, ("step",)) == {"step": [1, 2]}


def test_the_seven_columns_of_the_founding_study_are_training(path):
    path.write_text("step,elapsed_time_sec\n1,0.5\n2,0.9\n")
    assert columns_of(path, ("elapsed_time_sec", "loss")) == {"elapsed_time_sec": [0.5, 0.9], "loss": [None, None]}


@pytest.mark.parametrize("content", [None, "step,lo", header()])
def test_a_file_without_steps_has_no_rows(path, content):
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert read_steps(path)[0] == []


def test_only_plain_files_are_read(path):
    path.unlink()
    os.mkfifo(path)
    assert read_steps(path) == ([], ["steps.csv: not a regular file of at most 256 MiB"])
