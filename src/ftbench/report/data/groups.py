"""Runs → cells: the runs of one spec on one GPU belong together, and their figures become one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core.compare import Pace, geometric_mean
from ftbench.report.data.facts import NO_OPTIMIZATION, OPTIMIZATIONS, machine_facts, spec_facts, value_at
from ftbench.report.data.layout import gpu_of, known
from ftbench.report.render.tables import data_labels, state_of
from ftbench.store.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd

TOKENS, SAMPLES, STEP = "tokens_per_s.real", "samples_per_s", "step_time_s.median"
PEAK, FIRST, ENERGY = "memory_gb.allocated_peak", "first_step_s", "energy.joules_per_1k_samples"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its flat summary (`record`), the facts of its spec and of its machine, and where its files are."""

    record: Mapping[str, Any]
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


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one spec on one GPU. `facts` are those of spec and machine, with `gpu`; where the runs do not agree
    on one, all its values."""

    facts: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def ok(self) -> list[Run]:
        return [run for run in self.runs if run.ok]

    def values(self, name: str) -> list[float]:
        """A figure of each run that ended well and knows it."""
        return known((run.record for run in self.ok), name)

    def figure(self, name: str) -> float | None:
        """The geometric mean of the runs that ended well."""
        return geometric_mean(self.values(name))

    @property
    def state(self) -> str:
        """`ok`, `2 of 3 ok; oom: …`, or how the first run ended."""
        failed = [state_of(run.record) for run in self.runs if not run.ok]
        if not failed:
            return "ok"
        return f"{len(self.ok)} of {len(self.runs)} ok; {failed[0]}" if self.ok else failed[0]

    @property
    def name(self) -> str:
        """`qlora with gradient checkpointing at batch 4`: enough to tell it from its neighbours in a sentence."""
        method, on = self.facts.get("method.name", "unknown method"), value_at(OPTIMIZATIONS, self.facts)
        steps = self.facts.get("train.gradient_accumulation_steps", "1")
        batch = self.facts.get("train.batch_size", "?") + (f"x{steps}" if steps != "1" else "")
        return f"{method}{'' if on == NO_OPTIMIZATION else f' with {on}'} at batch {batch}"

    def pace(self) -> Pace | None:
        """How the cell goes, the mean of its runs; None where that is not known."""
        paces = [found for run in self.ok if (found := _pace(run.record)) is not None]
        if not paces:
            return None
        rate = geometric_mean([pace.samples_per_s for pace in paces])
        step = geometric_mean([pace.samples_per_step for pace in paces])
        start = statistics.fmean(pace.start_s for pace in paces)
        return Pace(start, rate, step) if rate and step else None


def _pace(record: Mapping[str, Any]) -> Pace | None:
    names = ("time_to_steady_s", "steps.warmup", "step_time_s.mean", SAMPLES)
    found = [known([record], name) for name in names]
    if not all(found) or not found[3][0]:
        return None
    start, warm, step, rate = (values[0] for values in found)
    return Pace(start - warm * step, rate, rate * step)


def runs_of(frame: pd.DataFrame) -> list[Run]:
    """The frame's rows with their facts; each JSON file is read once."""
    records = ({str(key): value for key, value in record.items()} for record in frame.to_dict("records"))
    found = []
    for record, data in zip(records, data_labels(frame), strict=True):
        run = RunDir(Path(str(record["path"])))
        found.append(Run(record, spec_facts(run), machine_facts(run), data))
    return found


def cells_of(runs: Iterable[Run], axis: str = "") -> list[Cell]:
    """Runs by spec and GPU (and by `axis`, where that is a fact of the machine), in the order of their first. A run
    without a readable spec is a cell of its own."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault((identity(run), run.ran.get(axis)), []).append(run)
    return [Cell(_facts(group), tuple(group)) for group in groups.values()]


def identity(run: Run) -> Any:
    """Equal for runs of the same spec on the same kind of GPU, wherever and whenever they ran."""
    return tuple(sorted(run.spec.items())) or run.record["path"], gpu_of(run.record)


def _facts(group: Sequence[Run]) -> dict[str, str]:
    first = group[0]
    facts = {"gpu": gpu_of(first.record), **first.spec}
    if not first.spec:
        facts |= {"method.name": str(first.record["method"]), "model.id": str(first.record["model"])}
    for key in dict.fromkeys(key for run in group for key in run.ran):
        # What ended early knows less of what ran: those that ended well speak for the cell.
        speaking = [run for run in group if run.ok] or group
        texts = dict.fromkeys(run.ran.get(key, "unknown") for run in speaking)
        if texts.keys() != {"unknown"}:
            facts[key] = " / ".join(texts)
    return facts


def first_of(cell: Cell, read: Callable[[Run], Any]) -> Any:
    """What the first of a cell's runs that has something has."""
    return next((found for run in (*cell.ok, *cell.runs) if (found := read(run))), None)


HEADINGS = ("model", "GPU", "data", "method", "with", "batch")


def who(cell: Cell) -> dict[str, Any]:
    facts = cell.facts
    return {
        "model": facts.get("model.id", ""), "gpu": facts["gpu"], "data": cell.runs[0].data,
        "method": facts.get("method.name", ""), "with": value_at(OPTIMIZATIONS, facts) or "",
        "batch": facts.get("train.batch_size", ""), "run_ids": " ".join(run.run_id for run in cell.runs),
    }  # fmt: skip


def shown(record: dict[str, Any]) -> list[str]:
    model = str(record["model"]).rsplit("/", 1)[-1]
    return [model, *(str(record[name]) for name in ("gpu", "data", "method", "with", "batch"))]
