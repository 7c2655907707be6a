"""Which runs a report is about."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ftbench.report.data.axes import value_at
from ftbench.report.data.collect import collect
from ftbench.report.data.facts import as_fact, flat
from ftbench.spec.load import shipped_recipes
from made_runs import make_run

PACKING = Path(__file__).resolve().parents[2] / "results" / "h200" / "qwen3-8b-packing"


def test_copies_of_a_run_count_once(tmp_path):
    shutil.copytree(PACKING, tmp_path / "copy")
    assert len(collect([PACKING, tmp_path / "copy"])) == len(collect([PACKING])) == 6


def test_different_runs_with_one_name_are_both_kept(tmp_path):
    shutil.copytree(PACKING, tmp_path / "copy")
    for steps in tmp_path.glob("copy/*/steps.csv"):
        steps.write_text(steps.read_text() + steps.read_text().splitlines()[-1] + "\n")
    assert len(collect([PACKING, tmp_path / "copy"])) == 12


def breaks():
    """Return ways to damage a run, with the expected reason of each."""
    return {
        "pipe": (lambda run: (run.steps.unlink(), os.mkfifo(run.steps)), "steps.csv: not a regular file"),
        "pipe-spec": (lambda run: (run.spec_json.unlink(), os.mkfifo(run.spec_json)), "spec.json: not a regular file"),
        "endless": (
            lambda run: (run.phases.unlink(), run.phases.symlink_to("/dev/zero")),
            "phases.json: not a",
        ),
        "deep": (lambda run: run.applied.write_text("[" * 100_000), "applied.json: not valid JSON"),
        "type": (lambda run: run.spec_json.write_text('{"train": {"batch_size": [4]}}'), "train.batch_size: Input"),
        "nan": (lambda run: run.summary.write_text('{"mfu": NaN}'), "summary.json: mfu: Input should"),
        "owner": (lambda run: run.state.write_text('{"state": "running", "owner": null}'), "owner: Input should"),
        "torn": (lambda run: run.machine.write_text('{"gpus": ['), "machine.json: not valid JSON"),
    }


def test_unreadable_runs_have_a_row_with_the_reason(tmp_path, ftbench):
    good = make_run(tmp_path, "good")
    odd = make_run(tmp_path, os.fsdecode(b"not-utf8-\xff"))
    for name, (damage, _) in breaks().items():
        damage(make_run(tmp_path, f"broken-{name}"))
    shown = {}
    for format_name in ("table", "csv", "json", "html"):
        code, shown[format_name], err = ftbench(
            "report", tmp_path, "--format", format_name, "--answers", "--rows", "each"
        )
        assert (code, err) == (0, "")
    rows = {record["run_id"]: record for record in collect([tmp_path])}
    assert {rows[run.run_id]["state"] for run in (good, odd)} == {"ok"}
    assert rows[good.run_id]["step_time_s.median"] == pytest.approx(1.0, rel=0.01)
    for name, (_, reason) in breaks().items():
        row = rows[f"broken-{name}"]
        assert row["state"] == "error"
        assert reason in row["reason"]
        assert row.get("step_time_s.median") is None
        assert all(f"broken-{name}" in shown[each] for each in ("csv", "json", "html"))
        assert all(reason in shown[each] for each in ("csv", "json"))


LAUNCHED = {"optimizations.cuda_graph": "off"}
KERNELS, NO_KERNELS = ({"optimizations.triton_kernels": value, **LAUNCHED} for value in ("on", "off"))


@pytest.mark.parametrize(
    ("recipe", "beside", "name"),
    [
        ("fastest", {}, "fastest"),
        ("fastest", NO_KERNELS, "fastest"),
        ("fastest", KERNELS | {"optimizations.fp8": "tensorwise-delayed"}, "fastest-fp8"),
        ("fastest", NO_KERNELS | {"optimizations.fp8": "tensorwise"}, "fastest-fp8"),
        ("fastest", KERNELS | {"optimizations.fp8": "tensorwise"}, "fastest-fp8 + triton kernels"),
        ("fastest", NO_KERNELS | {"optimizations.fp8": "tensorwise-delayed"}, "fastest + fp8 tensorwise-delayed"),
        ("fastest-qlora", {"optimizations.triton_kernels": "on"}, "fastest-qlora"),
        ("plain", {"optimizations.loader_processes": "8"}, "plain"),
    ],
)  # fmt: skip
def test_recipe_name_lists_further_optimizations(recipe, beside, name):
    settings = {key: as_fact(key, value) for key, value in flat(shipped_recipes()[recipe])}
    facts = {"method.name": "lora", **settings, **beside}
    assert value_at("recipe", facts) == name
