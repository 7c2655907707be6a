import dataclasses

import pytest

from ftbench.core.rows import RunSummary
from ftbench.report.data.collect import records
from ftbench.report.runs_table import runs_table

LONG = "ended with exit code 1 and no word: RuntimeError: an unexpected problem"
KNOWN = {"name": "alpaca", "tokens": {"mean": 110.4}}


def a_run(run_id="a-r1", axes=None, **changed):
    """Return the contents of a summary.json with the columns of a sweep's axes."""
    values = {
        "name": "exp", "state": "ok", "reason": None, "method": "lora", "model": "Qwen/Qwen3-8B", "weights": "random",
        "gpu": "NVIDIA H200", "batch_size": 4, "gradient_accumulation_steps": 1, "optimizations": [], "steps": {},
        "step_time_s": {"median": 0.5}, "tokens_per_s": {"real": 1234.5}, "samples_per_hour": 7200.0,
        "memory_gb": {"allocated_peak": 12.3}, "first_step_s": 2.0, "dataset": KNOWN,
    }  # fmt: skip
    return dataclasses.asdict(RunSummary(**values | {"run_id": run_id} | changed)) | (axes or {})


def table(*runs, axes=()):
    return runs_table(records(runs), axes)


def column(found, heading):
    return [row[found.headings.index(heading)] for row in found.rows]


# --- axes ------------------------------------------------------------------------------------------------------------


def test_hidden_axis_gets_a_column():
    runs = [a_run(f"a-r{rank}", {"method.rank": str(rank), "train.seed": "1"}) for rank in (8, 64)]
    found = table(*runs, axes=["method.rank", "train.seed"])
    after = found.headings.index("first step")
    assert found.headings[after + 1 :] == ["rank", "seed", "method", "batch"]
    assert column(found, "rank") == ["8", "64"]
    assert column(found, "seed") == ["1", "1"]


def test_varying_accumulation_is_shown_with_the_batch():
    found = table(a_run(batch_size=8), a_run("b-r1", batch_size=2, gradient_accumulation_steps=4))
    assert column(found, "batch") == ["8x1", "2x4"]
    assert column(table(a_run(batch_size=8, gradient_accumulation_steps=4)), "batch") == ["8"]


# --- failed rows -----------------------------------------------------------------------------------------------------


def test_failed_row_has_no_figures():
    found = table(a_run(), a_run("b-r1", state="timeout", reason="too long"))
    assert column(found, "tokens/s") == ["1,234", ""]
    assert column(found, "state") == ["ok", "timeout: too long"]


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datasets", "label"),
    [
        ([KNOWN], "alpaca ~110"),
        ([{"name": "alpaca"}, KNOWN, {"name": "alpaca", "tokens": {}}], "alpaca ~110"),
        ([KNOWN, {"name": "alpaca"}, {"name": "alpaca", "tokens": {"mean": 60.0}}],
         ["alpaca ~110", "alpaca", "alpaca ~60"]),
        ([{"name": "alpaca"}, {"name": "alpaca"}], "alpaca"),
        ([KNOWN, {}], ["alpaca ~110", "unknown"]),
    ],
    ids=["known", "of others", "others differ", "unknown length", "missing"],
)  # fmt: skip
def test_data_label_has_name_and_mean_length(datasets, label):
    found = table(*(a_run(f"a-r{i}", dataset=each) for i, each in enumerate(datasets)))
    assert (column(found, "data") if "data" in found.headings else found.context["data"]) == label


# --- notes -----------------------------------------------------------------------------------------------------------


def test_long_reason_is_shortened_and_noted_in_full():
    found = table(a_run(), a_run("b-r1", state="error", reason=LONG))
    (state,) = column(found, "state")[1:]
    assert state.endswith("…")
    assert len(state) == len("error: ") + 48
    assert found.notes == [f"b-r1: {LONG}"]


@pytest.mark.parametrize(
    ("warnings", "notes"),
    [
        ({"a-r1": ["hot"], "a-r2": ["hot"]}, ["hot"]), ({"a-r1": ["hot"]}, ["a-r1: hot"]),
        ({"a-r1": ["hot", "shared host"]}, ["a-r1: hot", "a-r1: shared host"]),
    ],
)  # fmt: skip
def test_warnings_are_notes(warnings, notes):
    assert table(*(a_run(run_id, warnings=each) for run_id, each in warnings.items())).notes == notes
