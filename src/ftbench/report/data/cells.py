"""Classes for a run and for a cell. A cell has the repeated runs of one spec on one kind of machine."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ftbench.core.compare import LAUNCH_BOUND_SPREAD, SITTING_SPREAD, Pace, geometric_mean, interval
from ftbench.core.stats import MINIMUM_STEADY, grouped_by
from ftbench.report.data.axes import GPUS
from ftbench.report.data.collect import Record, figure, known, state_of
from ftbench.report.data.facts import CARD, COMMIT, CPU
from ftbench.store.rundir import RunDir

TOKENS, SAMPLES = "tokens_per_s.real", "samples_per_s"
PEAK, FIRST, ENERGY = "memory_gb.allocated_peak", "first_step_s", "energy.joules_per_1k_samples"
BATCH, ACCUMULATION = "train.batch_size", "train.gradient_accumulation_steps"
_SITTING_S = 12 * 3600  # seconds; a sitting is a group of runs of one commit on one card that start within this time
DURATION = ("dataset.samples", "train.max_steps", "train.epochs", "dataset.longest_first")  # last in a name
_DURATION = re.compile(r"( \(|, )(?:samples|max steps|epochs|longest first) [^()]*\)$")  # the end of a name


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `record` is its summary as a flat dict. `spec` has its settings and `ran` has facts about its machine as
    text. `data` is the label of its data set."""

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
        """Whether the timing is not valid because other processes used the host or the GPU."""
        return bool(self.record.get("contention.contended"))

    @property
    def valid(self) -> bool:
        """Whether means include the figures of this run: the run succeeded and was not contended."""
        return self.ok and not self.contended

    @property
    def steady(self) -> int:
        return int(figure(self.record, "steps.steady") or 0)

    @property
    def started_s(self) -> float | None:
        """The start time in seconds since 1970 by the clock of the machine, or None if unknown."""
        with suppress(ValueError):
            return datetime.fromisoformat(self.record.get("started_at") or "").timestamp()
        return None

    @property
    def cache(self) -> str:
        """The state of the compiler's cache before the first step: `cold`, `warm`, `partly warm`, or `none`."""
        return str(self.record["first_step_cache"])


@dataclass(frozen=True, slots=True)
class Cell:
    """The repeated runs of one spec on one kind of machine.

    `facts` has the settings and facts about the machine, including `gpu`. If the runs disagree on a fact, its text
    lists all values. `variant` is the recipe or method, with more settings if two cells would have the same name.
    """

    facts: Mapping[str, str]
    runs: tuple[Run, ...]
    variant: str

    @property
    def batch(self) -> str:
        """The batch size as text: `4`, or `4x2` with two accumulation steps."""
        steps = self.facts.get(ACCUMULATION, "1")
        return self.facts.get(BATCH, "?") + (f"x{steps}" if steps != "1" else "")

    @property
    def recipe(self) -> str:
        """The recipe or method, without numbers of samples, steps or epochs, which only change the training time."""
        return _DURATION.sub(lambda match: ")" * (match[1] == ", "), self.variant)

    @property
    def gpus(self) -> int:
        """The number of GPUs. Speeds on different numbers of GPUs are not compared."""
        return int(self.facts.get(GPUS, "1"))

    @property
    def name(self) -> str:
        """The name in tables: `qlora with gradient checkpointing at batch 4` or `fastest-fp8 at batch 4`."""
        return f"{self.variant} at batch {self.batch}"

    @property
    def workload(self) -> tuple[str, str, str]:
        """The model id, the weights (`pretrained` or `random`), and the label of the data set."""
        return self.facts.get("model.id", ""), self.facts.get("model.weights", ""), self.runs[0].data

    @property
    def ok(self) -> list[Run]:
        return [run for run in self.runs if run.ok]

    @property
    def state(self) -> str:
        """The state as text: `ok`, `ok, contended`, `2 of 3 ok; oom: …`, or the state of the first run."""
        failed = [state_of(run.record) for run in self.runs if not run.ok]
        if not failed:
            contended = sum(run.contended for run in self.runs)
            some = "" if contended == len(self.runs) else f"{contended} of {len(self.runs)} "
            return f"ok, {some}contended" if contended else "ok"
        return f"{len(self.ok)} of {len(self.runs)} ok; {failed[0]}" if self.ok else failed[0]

    @property
    def valid(self) -> list[Run]:
        return [run for run in self.runs if run.valid]

    @property
    def launch_bound(self) -> bool:
        return any(run.record.get("bound.verdict") == "launch-bound" for run in self.valid)

    def values(self, name: str) -> list[float]:
        """Return the values of a figure from valid runs. Without valid runs, use contended runs for memory figures."""
        runs = self.valid or (self.ok if name.startswith("memory_gb.") else [])
        return known((run.record for run in runs), name)

    def figure(self, name: str) -> float | None:
        """Return the geometric mean of the values of a figure (see `values`)."""
        return geometric_mean(self.values(name))

    @property
    def samples_per_hour(self) -> float | None:
        rate = self.figure(SAMPLES)
        return None if rate is None else rate * 3600

    def speed_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of tokens per second, including the spread between sittings (cards or days)."""
        spread = LAUNCH_BOUND_SPREAD if self.launch_bound else SITTING_SPREAD
        return interval(self.values(TOKENS), spread)

    def first_steps(self) -> dict[str, list[float]]:
        """Return first-step times in seconds for each state of the compiler's cache: {"cold": [...], "warm": [...]}."""
        runs = [run for run in self.valid if figure(run.record, FIRST) is not None]
        by_state = grouped_by(runs, lambda run: run.cache)
        return {state: known((run.record for run in same), FIRST) for state, same in by_state.items()}

    def pace(self) -> Pace | None:
        """Return the mean pace of the runs, or None. If some runs have a cold compiler cache, use only these runs."""
        cold = [run for run in self.valid if run.cache == "cold"]
        paces = [pace for run in cold or self.valid if (pace := _pace(run.record)) is not None]
        if not paces:
            return None
        rate = geometric_mean([pace.samples_per_s for pace in paces])
        step = geometric_mean([pace.samples_per_step for pace in paces])
        start = statistics.fmean(pace.start_s for pace in paces)
        return Pace(start, rate, step) if rate and step else None

    @property
    def measured(self) -> bool:
        """Whether at least one valid run has enough steady steps for a reliable speed."""
        return any(run.steady >= MINIMUM_STEADY for run in self.valid)


def sitting_spread(sides: Sequence[Cell], single: bool = False) -> float:
    """Return the standard deviation of log(ratio) between different sittings (runs on one card within 12 hours).

    `sides` has the two compared cells. The result is 0 if all runs are from one sitting, and both sides were repeated.
    With `single`, the sides need not be repeated."""
    runs = [run for side in sides for run in side.valid]
    starts = [start for run in runs if (start := run.started_s) is not None]
    one_card = len({(run.ran.get(CARD), run.ran.get(COMMIT)) for run in runs}) == 1
    one_sitting = one_card and len(starts) == len(runs) and max(starts) - min(starts) <= _SITTING_S
    if one_sitting and (single or all(len(side.valid) > 1 for side in sides)):
        return 0.0
    return math.hypot(*(LAUNCH_BOUND_SPREAD if side.launch_bound else SITTING_SPREAD for side in sides))


def _pace(record: Mapping[str, Any]) -> Pace | None:
    names = ("time_to_steady_s", "steps.warmup", "step_time_s.mean", SAMPLES)
    start, warm, step, rate = (figure(record, name) for name in names)
    if start is None or warm is None or step is None or not rate:
        return None
    return Pace(start - warm * step, rate, rate * step)


def gpu_of(record: Record) -> str:
    return record.get("gpu") or CPU


def run_of(record: Mapping[str, Any]) -> str:
    """Return the number of a run for `ftbench show`, such as `#3`. Return the run id of a run without a number."""
    return f"#{number}" if (number := number_of(record)) else str(record["run_id"])


def number_of(record: Mapping[str, Any]) -> str:
    """Return the number of a run in its report, or an empty string."""
    return str(record.get("number") or "")
