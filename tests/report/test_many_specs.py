"""The work of a report is linear in the number of specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from page_runs import made

from counting import lines_of
from ftbench.report import answer
from ftbench.report.build import Request, report
from ftbench.report.compare import pairs, partners
from ftbench.report.data import groups as naming
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.groups import cells_of
from ftbench.store import rundir

RATE = "train.learning_rate"


def cells(count: int, **more: Any) -> list[Cell]:
    """Return cells of one run each that differ in the learning rate."""
    return cells_of([run(number, **more) for number in range(1, count + 1)])


def run(number: int, state: str = "ok", model: str = "model") -> Run:
    record = {
        "path": f"/nowhere/{number}", "run_id": f"run-{number}", "number": number, "state": state, "method": "lora",
        "reason": None if state == "ok" else "out of memory", "gpu": "NVIDIA H200", "model": model, "warnings": [],
        "batch_size": 1, "gradient_accumulation_steps": 1, "weights": "random", "steps.steady": 20,
        "tokens_per_s.real": 9000.0 - number, "samples_per_s": 90.0 - number / 100, "first_step_cache": "none",
        "memory_gb.allocated_peak": 20.0,
    }  # fmt: skip
    spec = {"model.id": model, "method.name": "lora", "train.batch_size": "1", RATE: str(number / 1e6)}
    return Run(record, spec, {}, "alpaca")


def ranked(count: int) -> Callable[[], Any]:
    listed = cells(count)
    return lambda: answer.rankings(listed)


def left_out(count: int) -> Callable[[], Any]:
    listed = [cell for number in range(count) for cell in cells_of([run(number, model=f"model-{number}")])]
    return lambda: answer.left_out_text(*answer.rankings(listed))


def baseline(count: int) -> Callable[[], Any]:
    listed = cells(count)
    return lambda: partners.baseline_value(RATE, listed, None)


def names(count: int) -> Callable[[], Any]:
    runs = [run(number) for number in range(count)]
    return lambda: cells_of(runs)


@pytest.mark.parametrize("part", [ranked, left_out, baseline, names])
def test_work_is_linear_in_specs(part):
    part(10)()  # fills caches
    fewer, more = (lines_of(part(count)) for count in (80, 160))
    assert more < 2.3 * fewer


def test_names_use_only_differing_facts(monkeypatch):
    shown = []
    monkeypatch.setattr(naming, "short_value", lambda text: shown.append(text) or text)
    listed = cells(100)
    assert [cell.variant for cell in listed[:2]] == ["lora (learning rate 1e-06)", "lora (learning rate 2e-06)"]
    assert len(shown) == 100


def test_page_of_many_specs_reads_few_steps(tmp_path, monkeypatch):
    for number in range(20):
        made_run = made(tmp_path, "lora", 4, steps=12, speed=0.5 + number / 1000)
        spec = rundir.read_json(made_run.spec_json)
        spec["train"]["learning_rate"] = number / 1e6
        rundir.write_json(made_run.spec_json, spec)
    read, read_steps = [], pairs.read_steps
    monkeypatch.setattr(pairs, "read_steps", lambda path: read.append(path) or read_steps(path))
    assert "20 runs" in report(Request([tmp_path], "html")).text
    assert len(read) < 30
