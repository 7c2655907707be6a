"""Runs that belong together, for every table, bar and sentence: repeats are the runs of one spec on one kind of
machine, and only those. Each group has one short name, unlike those of its neighbours."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.compare import Pace, geometric_mean
from ftbench.core.stats import MINIMUM_STEADY
from ftbench.report.data.axes import FRAMEWORK, GPUS, TRL, framework_words
from ftbench.report.data.collect import Record, data_labels, figure, known, state_of
from ftbench.report.data.experiments import repeats
from ftbench.report.data.facts import CPU, clean_document, machine_facts, spec_facts
from ftbench.report.data.ways import told_apart, way_of
from ftbench.store.rundir import RunDir

TOKENS, SAMPLES, STEP = "tokens_per_s.real", "samples_per_s", "step_time_s.median"
PEAK, FIRST, ENERGY = "memory_gb.allocated_peak", "first_step_s", "energy.joules_per_1k_samples"
_BATCH, _ACCUMULATION = "train.batch_size", "train.gradient_accumulation_steps"
_LASTING = re.compile(r" \((?:(?:samples|max steps|epochs|longest first) [^,()]*(?:, )?)+\)$")  # how long it trained


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its record, the facts of its spec and of its machine, and the label of its data."""

    record: Record
    spec: Mapping[str, str]
    ran: Mapping[str, str]
    data: str

    @property
    def dir(self) -> RunDir:
        return RunDir(Path(str(self.record["path"])))

    @property
    def run_id(self) -> str:
        return str(self.record["run_id"])

    @property
    def ok(self) -> bool:
        return bool(self.record["state"] == "ok")

    @property
    def contended(self) -> bool:
        """Whether other work took so much of the host or the GPU that its times are no measurement of this run."""
        return bool(self.record.get("contention.contended"))

    @property
    def steady(self) -> int:
        return int(figure(self.record, "steps.steady") or 0)

    @property
    def cache(self) -> str:
        """The compiler's cache before the first step: `cold`, `warm`, `partly warm`, or `none` without a compiler."""
        return cache_of(self.record)


@dataclass(frozen=True, slots=True)
class Cell:
    """The repeats of one spec on one kind of machine. `facts` are those of spec and machine, with `gpu`; where the runs
    do not agree on one, all its values. `way` says how it trains, in words that no other cell of the same workload and
    batch has."""

    facts: Mapping[str, str]
    runs: tuple[Run, ...]
    way: str

    @property
    def batch(self) -> str:
        """`4`, or `4x2` with accumulation."""
        steps = self.facts.get(_ACCUMULATION, "1")
        return self.facts.get(_BATCH, "?") + (f"x{steps}" if steps != "1" else "")

    @property
    def recipe(self) -> str:
        """`way` whatever the number of samples or steps, which makes another run and no other way of training."""
        return _LASTING.sub("", self.way)

    @property
    def gpus(self) -> int:
        """On how many it trains: speeds on unlike numbers are no comparison of ways."""
        return int(self.facts.get(GPUS, "1"))

    @property
    def name(self) -> str:
        """`qlora with gradient checkpointing at batch 4`, `fastest-fp8 at batch 4`."""
        return f"{self.way} at batch {self.batch}"

    @property
    def workload(self) -> tuple[str, str, str]:
        """Model, weights and data."""
        return self.facts.get("model.id", ""), self.facts.get("model.weights", ""), self.runs[0].data

    @property
    def ok(self) -> list[Run]:
        return [run for run in self.runs if run.ok]

    @property
    def state(self) -> str:
        """`ok`, `ok, contended`, `2 of 3 ok; oom: …`, or how the first run ended."""
        failed = [state_of(run.record) for run in self.runs if not run.ok]
        if not failed:
            beside = sum(run.contended for run in self.runs)
            some = "" if beside == len(self.runs) else f"{beside} of {len(self.runs)} "
            return f"ok, {some}contended" if beside else "ok"
        return f"{len(self.ok)} of {len(self.runs)} ok; {failed[0]}" if self.ok else failed[0]

    def values(self, name: str) -> list[float]:
        """Return a figure of each run that ended well and knows it."""
        return known((run.record for run in self.ok), name)

    def figure(self, name: str) -> float | None:
        """Return the geometric mean of the runs that ended well."""
        return geometric_mean(self.values(name))

    def first_steps(self) -> dict[str, list[float]]:
        """Return the seconds of the first steps by the state of the compiler's cache: no mean is over both."""
        seconds_by_state: dict[str, list[float]] = {}
        for run in self.ok:
            if (seconds := figure(run.record, FIRST)) is not None:
                seconds_by_state.setdefault(run.cache, []).append(seconds)
        return seconds_by_state

    def pace(self) -> Pace | None:
        """Return how the cell goes, the mean of its runs, of those with a cold cache where there are any; None where
        that is not known."""
        cold = [run for run in self.ok if run.cache == "cold"]
        paces = [pace for run in cold or self.ok if (pace := _pace(run.record)) is not None]
        if not paces:
            return None
        rate = geometric_mean([pace.samples_per_s for pace in paces])
        step = geometric_mean([pace.samples_per_step for pace in paces])
        start = statistics.fmean(pace.start_s for pace in paces)
        return Pace(start, rate, step) if rate and step else None

    def undisturbed(self) -> Cell | None:
        """Return the cell without its contended runs; None where no run is left that ended well, or failed."""
        runs = tuple(run for run in self.runs if not run.contended)
        return Cell(self.facts, runs, self.way) if runs else None

    @property
    def measured(self) -> bool:
        """Whether a run has as many steady steps as a figure needs to be relied on."""
        return any(run.steady >= MINIMUM_STEADY for run in self.ok)


def _pace(record: Mapping[str, Any]) -> Pace | None:
    names = ("time_to_steady_s", "steps.warmup", "step_time_s.mean", SAMPLES)
    start, warm, step, rate = (figure(record, name) for name in names)
    if start is None or warm is None or step is None or not rate:
        return None
    return Pace(start - warm * step, rate, rate * step)


def runs_of(records: Sequence[Record]) -> list[Run]:
    """Return the records with their facts; each JSON file is read once."""
    labels = data_labels(records)
    runs = []
    for record, label in zip(records, labels, strict=True):
        run = RunDir(Path(str(record["path"])))
        runs.append(Run(record, spec_facts(run), machine_facts(run), label))
    return runs


def cells_of(runs: Iterable[Run], axis: str = "") -> list[Cell]:
    """Return the groups of repeats (and by `axis`, where that is a fact of the machine), in the order of their first
    runs. A run without a readable spec is a cell of its own."""
    groups = repeats(runs, axis)
    facts = [_facts(group) for group in groups]
    cells = [Cell(own, tuple(group), way_of(own)) for own, group in zip(facts, groups, strict=True)]
    others = {(cell.workload, cell.way) for cell in cells if cell.facts.get(FRAMEWORK, TRL) != TRL}
    by = (framework_words(cell.facts) * ((cell.workload, cell.way) in others) for cell in cells)
    return told_apart([replace(cell, way=name + cell.way) for cell, name in zip(cells, by, strict=True)], axis)


def cache_of(record: Record) -> str:
    """Return the state of the compiler's cache before a run's first step; older summaries do not tell it."""
    state = record.get("first_step_cache") or clean_document(RunDir(Path(record["path"])).applied).get("compile_cache")
    return state or "none"


def gpu_of(record: Record) -> str:
    return record.get("gpu") or CPU


def _facts(group: Sequence[Run]) -> dict[str, str]:
    first = group[0]
    facts = {"gpu": gpu_of(first.record), **first.spec}
    if not first.spec:
        known = {"method.name": "method", "model.id": "model", _BATCH: "batch_size",
                 _ACCUMULATION: "gradient_accumulation_steps"}  # fmt: skip
        facts |= {key: str(first.record[name]) for key, name in known.items() if first.record[name]}
    # What ended early knows less of what ran: those that ended well speak for the cell. Repeats share their facts.
    speaking = {id(run.ran): run.ran for run in [run for run in group if run.ok] or group}.values()
    for key in dict.fromkeys(key for ran in {id(run.ran): run.ran for run in group}.values() for key in ran):
        texts = dict.fromkeys(ran.get(key, "unknown") for ran in speaking)
        if texts.keys() != {"unknown"}:
            facts[key] = " / ".join(texts)
    return facts
