"""`sweep --until-oom`: search for the largest batch that fits. Each trial is an ordinary run."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ftbench.spec import identity
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import NOT_FINITE, read_json
from ftbench.store.summary import read_summary
from ftbench.sweep.plan.base import (
    PENDING,
    Job,
    Options,
    Plan,
    Standing,
    is_batch_too_large,
    job,
    on_resume,
    read_standing,
)

LARGEST_BATCH = 4096
# Settings of all trials
TRIAL = {"train.max_steps": 7, "dataset.longest_first": True, "measure.eval": "off", "measure.profile": "off"}
KNEE = 1.05  # ratio of two speeds; a smaller gain is ignored


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a run with one batch size."""

    batch: int
    fits: bool | None  # None if the run failed for a reason other than memory
    speed: float | None = None  # real tokens/s
    peak_gb: float | None = None  # peak of the allocator's pool, GiB
    reason: str | None = None
    oom: dict[str, Any] | None = None


def next_batch(trials: Sequence[Trial], candidates: Sequence[int], seed: int | None = None) -> int | None:
    """Return the next batch size to try, or None when the limit is known.

    Double the batch size until a size does not fit. Then bisect between the largest size that fits and the smallest
    that does not. `seed` is the predicted largest size that fits: doubling stops at `seed`, and then the size grows by
    1, 2, 4. `candidates` is sorted.
    """
    if any(trial.fits is None for trial in trials):
        return None
    fitting = [trial.batch for trial in trials if trial.fits]
    failing = [trial.batch for trial in trials if trial.fits is False]
    if not trials:
        return candidates[0]
    if not failing:
        return _larger(max(fitting), candidates, seed)
    low, high = max(fitting, default=0), min(failing)
    between = [batch for batch in candidates if low < batch < high]
    return between[len(between) // 2] if between else None


def _larger(largest: int, candidates: Sequence[int], seed: int | None) -> int | None:
    """Return the next larger batch size to try, or None. `largest` is the largest size that has fitted."""
    larger = [batch for batch in candidates if batch > largest]
    wanted = 2 * largest
    if seed is not None and largest < seed:
        below = [batch for batch in larger if batch <= seed]
        wanted = min(wanted, max(below, default=wanted))
    elif seed is not None:
        wanted = largest + max(1, 2 * (largest - seed))
    return min((batch for batch in larger if batch >= wanted), default=max(larger, default=None))


@dataclass(frozen=True, slots=True)
class Edge:
    """The result of a search: the largest batch that fits, the smallest that does not, knee (see `knee`), note."""

    largest: Trial | None
    first_failing: Trial | None
    knee: int | None
    note: str


def edge(trials: Sequence[Trial], candidates: Sequence[int], seed: int | None = None) -> Edge:
    """Return what is known from the trials: the largest batch that fits, the smallest that does not, and the knee."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.batch)
    failing = sorted((trial for trial in trials if trial.fits is False), key=lambda trial: trial.batch)
    note = ""
    if broken := [trial for trial in trials if trial.fits is None]:
        note = f"stopped at batch {broken[0].batch}: {broken[0].reason}"
    elif next_batch(trials, candidates, seed) is not None:
        note = "not finished"
    elif fitting and not failing:
        note = f"not reached up to batch {candidates[-1]:,}"
    return Edge(fitting[-1] if fitting else None, failing[0] if failing else None, knee(fitting), note)


def knee(fitting: Sequence[Trial]) -> int | None:
    """Return the smallest batch such that all larger ones are less than 5 % faster. None for fewer than two speeds."""
    known = sorted((trial.batch, trial.speed) for trial in fitting if trial.speed)
    flat = (batch for i, (batch, speed) in enumerate(known) if all(later < KNEE * speed for _, later in known[i + 1 :]))
    return next(flat) if len(known) > 1 else None


@dataclass(slots=True)
class Family:
    """The settings of a cell without its batch size. `seed` is the estimator's largest batch that fits."""

    spec: Experiment
    sets: tuple[str, ...]
    values: dict[str, Any]
    refused: str | None = None
    trials: dict[int, Trial] = field(default_factory=dict)  # finished trials by batch size
    running: Job | None = None
    stopped: bool = False
    seed: int | None = None


class Search(Plan):
    """The plan of `--until-oom`: for each cell, search for the largest batch that fits."""

    def __init__(self, families: Iterable[Family], options: Options, gpu: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.families = list(families)
        for family in self.families:
            family.seed = _first_trial(family.spec, gpu, options.folder.parent)
            family.stopped = bool(family.refused)

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        for family in self.families:
            trial = None if family.running or family.stopped else self._next_trial(family)
            if trial is not None and has_time(trial):
                family.running = trial
                self.standings[trial] = Standing("running")
                return trial
        return None

    def _next_trial(self, family: Family) -> Job | None:
        """Return the next trial to run, or None. Read the results of finished trials from their run directories."""
        while (batch := next_batch([*family.trials.values()], self.candidates(family), family.seed)) is not None:
            trial = self._job(family, batch)
            now = on_resume(read_standing(trial.run), self.options.retry_failed)
            if now.state == "running":  # another process runs it, and the next session reads its result
                self.standings[trial] = now
                family.stopped = True
                return None
            crowded = now.state == "oom" and not is_batch_too_large(trial.run)
            if (self.options.force or crowded) and trial not in self.standings:
                now = PENDING
            if not now.done:
                return trial
            self._add_trial(family, trial, now)
        return None

    def ended(self, job: Job) -> None:
        (family,) = (family for family in self.families if family.running == job)
        family.running = None
        now = read_standing(job.run)
        if now.done and not self.is_retried(job, now):
            self._add_trial(family, job, now)
        elif not now.done:
            self.standings[job] = now
            family.stopped = True

    def _add_trial(self, family: Family, trial: Job, now: Standing) -> None:
        self.record(trial, now)
        family.trials[trial.spec.train.batch_size] = trial_of(trial, now)

    def candidates(self, family: Family) -> list[int]:
        """Return the allowed batch sizes. A batch size must not be larger than the dataset. The number of sequences per
        step must be a multiple of the group size (grpo)."""
        accumulation, group = family.spec.train.gradient_accumulation_steps, family.spec.objective.group
        allowed = [batch for batch in range(1, LARGEST_BATCH + 1) if batch * accumulation % group == 0]
        limit = self._samples(family)
        return [batch for batch in allowed if limit is None or batch <= limit] or allowed[:1]

    def _samples(self, family: Family) -> int | None:
        """Return the number of samples in the dataset, from a trial or the spec. Return None for generated data."""
        if family.spec.dataset.is_generated:
            return None
        datasets = (read_json(self._job(family, batch).run.applied).get("dataset", {}) for batch in family.trials)
        return next((int(each["samples"]) for each in datasets if each.get("samples")), family.spec.dataset.samples)

    def edges(self) -> list[tuple[Family, list[Trial], Edge]]:
        """Return (family, finished trials, result of the search) for each cell. The family has the cell's settings."""
        edges = []
        for family in self.families:
            trials = [family.trials[batch] for batch in sorted(family.trials)]
            limit = edge(trials, self.candidates(family), family.seed)
            edges.append((family, trials, replace(limit, note=family.refused) if family.refused else limit))
        return edges

    def as_dicts(self) -> list[dict[str, Any]]:
        return [
            {"cell": family.values, "method": family.spec.method.name, **asdict(edge)}
            | {"trials": list(map(asdict, trials))}
            for family, trials, edge in self.edges()
        ]

    def _job(self, family: Family, batch: int) -> Job:
        spec = family.spec
        changes: dict[str, Any] = {
            "train.batch_size": batch, "train.gradient_accumulation_steps": spec.train.gradient_accumulation_steps,
            **TRIAL,
        }  # fmt: skip
        if spec.dataset.is_generated:
            changes["dataset.samples"] = max(spec.dataset.samples or 0, batch)
        trial = with_changes(spec, changes | {"measure.repeats": 1})
        sets = (f"{key}={'on' if value is True else value}" for key, value in changes.items())
        values = family.values | {"train.batch_size": batch}
        made = job(trial, (*family.sets, *sets), values, 1, self.options.folder, self.options.gpu)
        return replace(made, family=identity.fingerprint_without_batch(spec, self.options.gpu))


def _first_trial(spec: Experiment, gpu: dict[str, Any] | None, folder: Path) -> int | None:
    """Return the largest batch that the estimator expects to fit. Return None if the estimator is not installed."""
    with suppress(ImportError):
        from ftbench.estimate import api

        return api.first_trial(spec, gpu, folder, LARGEST_BATCH)
    return None


def trial_of(job: Job, now: Standing) -> Trial:
    """Return the trial of a finished job: whether the batch fits, and its speed and memory."""
    batch = job.spec.train.batch_size
    if now.state == "oom":
        if not is_batch_too_large(job.run):
            return Trial(batch, None, reason="out of memory while others used the GPU")
        return Trial(batch, False, reason=now.reason, oom=read_json(job.run.state).get("oom"))
    if now.state not in ("ok", NOT_FINITE):
        return Trial(batch, None, reason=now.reason)
    summary = read_summary(job.run)
    return Trial(batch, True, summary["tokens_per_s"].get("real"), summary["memory_gb"].get("reserved_peak"))
