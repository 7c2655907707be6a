"""The work of a report is linear in the number of specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from page_runs import made

from counting import lines_of
from ftbench.core.learning import DIFFERS, Learning
from ftbench.core.stats import median_error
from ftbench.report.build import Request, report
from ftbench.report.compare import pairs, partners
from ftbench.report.data import names as naming
from ftbench.report.data.cells import Cell, Run
from ftbench.report.data.groups import cells_of
from ftbench.report.document import Report
from ftbench.report.page import overview, view
from ftbench.report.sections import decision, scaling
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


def failed_cards(count: int) -> Callable[[], Any]:
    failed = cells(count, state="oom")
    return lambda: overview.cards(failed)


def workloads(count: int) -> Callable[[], Any]:
    records = [run(number, model=f"model-{number}").record for number in range(count)]
    return lambda: [overview.cards(own) for own in view.view(Report(records)).cells]


def baseline(count: int) -> Callable[[], Any]:
    listed = cells(count)
    return lambda: partners.baseline_value(RATE, listed, None)


def lines_over_gpus(count: int) -> Callable[[], Any]:
    records = [{"recipe": f"lora {number}", "batch": "1", "strategy": "ddp", "gpus": gpus, "tokens_per_s": 1.0}
               for number in range(count) for gpus in (1, 2)]  # fmt: skip
    return lambda: scaling._curves(records)


def names(count: int) -> Callable[[], Any]:
    runs = [run(number) for number in range(count)]
    return lambda: cells_of(runs)


@pytest.mark.parametrize("part", [failed_cards, workloads, baseline, lines_over_gpus, names])
def test_work_is_linear_in_specs(part):
    part(10)()  # fills caches
    fewer, more = (lines_of(part(count)) for count in (150, 300))
    assert more < 2.3 * fewer


def test_names_use_only_differing_facts(monkeypatch):
    shown = []
    monkeypatch.setattr(naming, "short_value", lambda text: shown.append(text) or text)
    listed = cells(100)
    assert [cell.way for cell in listed[:2]] == ["lora (learning rate 1e-06)", "lora (learning rate 2e-06)"]
    assert len(shown) == 100


def test_median_interval_is_cached_by_length():
    values = [float(number % 17) for number in range(480)]
    median_error(values)
    assert lines_of(lambda: median_error(values)) < 50


def test_page_of_many_specs_reads_few_steps(tmp_path, monkeypatch):
    for number in range(30):
        made_run = made(tmp_path, "lora", 4, steps=12, speed=0.5 + number / 1000)
        spec = rundir.read_json(made_run.spec_json)
        spec["train"]["learning_rate"] = number / 1e6
        rundir.write_json(made_run.spec_json, spec)
    read, read_columns = [], pairs.read_columns
    monkeypatch.setattr(pairs, "read_columns", lambda *given: read.append(given) or read_columns(*given))
    assert "30 runs" in report(Request([tmp_path], "html")).text
    assert len(read) < 6


def test_fastest_is_compared_with_the_next_fastest_and_few_are_named(monkeypatch):
    compared: list[Cell] = []

    def differs(baseline: Cell, cell: Cell) -> Learning:
        compared.append(baseline)
        return Learning(DIFFERS, "its mean loss differs by +9 %, allowed are 1 %")

    monkeypatch.setattr(decision, "learning_of", differs)
    listed = cells(300)
    points = [
        point
        for point in decision.decision(listed).points
        if "do not learn" in point.text or "not compared" in point.text
    ]
    assert compared == listed[1:51]
    assert len(points) == 8
    assert points[0].text.startswith(f"{listed[0].name} and {listed[1].name} do not learn the same: its mean loss")
    assert points[-2].text == f"{listed[0].name} and 44 more of the next fastest do not learn the same."
    assert len(points[-2].runs) == 45
    assert "the 249 slowest others" in points[-1].text


def test_few_of_many_out_of_memory_cells_are_named():
    def out_of_memory(cell: Cell) -> Cell:
        return replace(cell, runs=tuple(replace(each, record=each.record | {"state": "oom"}) for each in cell.runs))

    (point,) = _out_of_memory([out_of_memory(cell) for cell in cells(40)])
    assert point.text.count("does not fit at batch 1") == 6
    assert point.text.endswith(" and 34 more.")
    assert len(point.runs) == 40


def _out_of_memory(failed: Sequence[Cell]) -> list[Any]:
    return [point for point in decision.decision(failed).points if point.text.startswith("Out of memory")]
