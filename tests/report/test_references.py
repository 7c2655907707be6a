"""Published figures: always labelled, with their source, beside the nearest run and never in a ratio with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftbench.core.hardware import gpus
from ftbench.core.rows import StepRow
from ftbench.facts import read_facts
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.sections import references
from ftbench.report.sections.references import KEYS, LABEL, beside, match
from ftbench.spec.datasets import DATASETS
from ftbench.spec.methods import METHODS
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter
from ftbench.store.summary import as_dict, summarise


def made_run(folder: Path, gpu: str = "NVIDIA H200", state: str = "ok", **spec: object) -> RunDir:
    """A run of Qwen3-32B whose steps take a second for two samples."""
    run = rundir.claim_at(folder / "study" / f"r{len(list(folder.glob('study/*')))}")
    values = {"name": "study", "model": {"id": "Qwen/Qwen3-32B"}, "method": {"name": "lora"},
              "dataset": {"name": "japanese-alpaca"}, "measure": {"warmup": 1},
              "train": {"batch_size": 2, "gradient_accumulation_steps": 1}, **spec}  # fmt: skip
    rundir.write_json(run.spec_json, values)
    rundir.write_json(run.machine, {"gpu": {"name": gpu}})
    writer = StepsWriter(run.steps)
    writer.append(
        StepRow(step=i, phase="train", step_time_s=1.0, elapsed_time_sec=float(i), samples=2,
                            real_tokens=200, padded_tokens=300, label_tokens=100)
        for i in range(1, 12)
    )  # fmt: skip
    writer.close()
    rundir.write_json(run.state, {"schema": 1, "state": state, **({} if state == "ok" else {"reason": "why"})})
    rundir.write_json(run.summary, as_dict(summarise(run)))
    return run


def cells(folder: Path):
    return cells_of(runs_of(collect([folder])))


ENTRY = {"source": "founding", "model": "qwen3-32b", "gpu": "H100 SXM5", "data": "japanese-alpaca", "batch": 32,
         "samples_per_hour": 27000}  # fmt: skip


def test_every_entry_names_what_ftbench_names_and_has_a_source_and_a_figure():
    table = read_facts("references.yaml")
    for entry in table["figures"]:
        assert entry["source"] in table["sources"]
        assert entry.get("gpu") in {None, *(gpu.name for gpu in gpus())}
        assert entry.get("method") in {None, *METHODS}
        assert entry.get("data") in {None, *DATASETS}
        assert set(entry) & {*references.FIGURES, "text"}
        assert set(entry) <= {"source", "with", "text", *KEYS, *references.FIGURES}
    assert set(table["sources"]) == {entry["source"] for entry in table["figures"]}


def test_the_founding_study_s_figures_are_there():
    found = {(e["model"], e["gpu"], e["data"]): e["samples_per_hour"] for e in read_facts("references.yaml")["figures"]
             if e["source"] == "founding"}  # fmt: skip
    assert found["qwen3-32b", "H100 SXM5", "japanese-alpaca"] == 27_000
    assert found["qwen3-32b", "RTX PRO 6000 Blackwell Max-Q", "wikipedia-ja"] == 3_600
    assert found["gpt-oss-120b", "RTX PRO 6000 Blackwell Max-Q", "wikipedia-ja"] == 7_300
    assert len(found) == 8


def test_an_entry_is_beside_the_run_with_most_in_common(tmp_path):
    made_run(tmp_path, dataset={"name": "wikipedia-ja"})
    near = made_run(tmp_path, gpu="NVIDIA H100 80GB HBM3")
    made_run(tmp_path)
    found = match(ENTRY, cells(tmp_path))
    assert [run.run_id for run in found.cell.runs] == [near.run_id]
    assert found.same == ("model", "data", "gpu")
    assert found.other == ("batch",)


def test_what_a_source_does_not_tell_is_neither_the_same_nor_other(tmp_path):
    made_run(tmp_path)
    found = match({key: value for key, value in ENTRY.items() if key != "batch"}, cells(tmp_path))
    assert (found.same, found.other) == (("model", "data"), ("gpu",))


def test_a_run_that_ended_well_goes_before_one_that_did_not(tmp_path):
    made_run(tmp_path, state="oom", measure={"warmup": 2})
    well = made_run(tmp_path)
    assert [run.run_id for run in match(ENTRY, cells(tmp_path)).cell.runs] == [well.run_id]


def test_synthetic_data_of_the_same_lengths_is_not_the_same_data(tmp_path):
    made_run(tmp_path, dataset={"name": "synthetic", "like": "japanese-alpaca", "samples": 10})
    found = match(ENTRY, cells(tmp_path))
    assert "data" in found.other
    section = beside(cells(tmp_path))
    assert any("data (synthetic like japanese-alpaca)" in cell for row in section.table.rows for cell in row)


def test_another_model_is_beside_nothing(tmp_path):
    made_run(tmp_path, model={"id": "Qwen/Qwen3-8B"})
    assert match(ENTRY, cells(tmp_path)).cell is None
    assert all(record["run_ids"] is None for record in beside(cells(tmp_path)).records)


def test_those_of_a_model_that_was_run_come_first_with_the_measured_figure(tmp_path):
    made_run(tmp_path, model={"id": "openai/gpt-oss-120b"})
    section = beside(cells(tmp_path))
    assert [row[1] for row in section.table.rows][:5] == ["gpt-oss-120b"] * 4 + ["qwen3-32b"]
    assert section.table.rows[0][section.table.headings.index("published")] == "samples/h 9,400"
    assert (
        section.table.rows[0][section.table.headings.index("measured here")]
        == "samples/h 7,200 (lora at batch 2 on NVIDIA H200)"
    )
    assert section.records[0]["measured.samples_per_hour"] == pytest.approx(7200)


def test_every_entry_of_a_section_is_labelled_and_no_ratio_is_given(tmp_path):
    made_run(tmp_path)
    section = beside(cells(tmp_path))
    assert section.title == LABEL == "Published, not measured here"
    assert all(record["label"] == LABEL and record["source"] for record in section.records)
    assert "no ratio is given" in section.paragraphs[0]
    assert not any("ratio" in key for record in section.records for key in record)


@pytest.mark.parametrize("name", ["table", "md", "latex", "html", "json"])
def test_every_format_labels_them_and_tells_of_the_sparse_peaks(tmp_path, name):
    made_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ftbench", "report", str(tmp_path), "--references", "--format", name],
        capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "400"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "published, not measured here" in done.stdout.lower()
    assert "with 2:4 sparsity" in " ".join(done.stdout.split())
    assert "Fixstars tech blog" in done.stdout
    if name == "json":
        assert len(json.loads(done.stdout)["references"]["records"]) == len(read_facts("references.yaml")["figures"])


def test_without_being_asked_for_they_stay_away(tmp_path):
    made_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ftbench", "report", str(tmp_path), "--answers"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PUBLISHED" not in done.stdout.upper()
