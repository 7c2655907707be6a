"""`sweep --until-oom`: search for the largest batch that fits. Each trial is an ordinary run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ftbench.spec import identity
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import NOT_FINITE, read_json
from ftbench.store.summary import read_summary
from ftbench.sweep.plan.base import PENDING, Job, JobStatus, Options, Plan, is_batch_too_large, job, read_status

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
    """Return the next larger batch size to try, or None. `largest` is the largest size that fits so far."""
    larger = [batch for batch in candidates if batch > largest]
    wanted = 2 * largest
    if seed is not None and largest < seed:
        below = [batch for batch in larger if batch <= seed]
        wanted = min(wanted, max(below, default=wanted))
    elif seed is not None:
        wanted = 2 * largest - seed + 1  # the distance from the seed doubles
    return min((batch for batch in larger if batch >= wanted), default=max(larger, default=None))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: the largest batch that fits, the smallest that does not, knee (see `knee`), note."""

    largest: Trial | None
    first_failing: Trial | None
    knee: int | None
    note: str


def search_result(trials: Sequence[Trial], candidates: Sequence[int], seed: int | None = None) -> SearchResult:
    """Return the largest batch that fits, the smallest that does not, and the knee, as far as the trials show them."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.batch)
    failing = sorted((trial for trial in trials if trial.fits is False), key=lambda trial: trial.batch)
    note = ""
    if broken := [trial for trial in trials if trial.fits is None]:
        note = f"stopped at batch {broken[0].batch}: {broken[0].reason}"
    elif next_batch(trials, candidates, seed) is not None:
        note = "not finished"
    elif fitting and not failing:
        note = f"not reached up to batch {candidates[-1]:,}"
    return SearchResult(fitting[-1] if fitting else None, failing[0] if failing else None, knee(fitting), note)


def knee(fitting: Sequence[Trial]) -> int | None:
    """Return the smallest batch such that all larger ones are less than 5 % faster. None for fewer than two speeds."""
    known = sorted((trial.batch, trial.speed) for trial in fitting if trial.speed)
    flat = (batch for i, (batch, speed) in enumerate(known) if all(later < KNEE * speed for _, later in known[i + 1 :]))
    return next(flat) if len(known) > 1 else None


@dataclass(slots=True)
class SearchCell:
    """A cell without its batch size, and the state of its search. `seed` is the estimator's largest batch that fits."""

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

    def __init__(self, cells: Iterable[SearchCell], options: Options, gpu: dict[str, Any] | None = None) -> None:
        from ftbench.estimate import api

        super().__init__(options)
        self.cells = list(cells)
        for cell in self.cells:
            cell.seed = api.first_trial(cell.spec, gpu, options.folder.parent, LARGEST_BATCH)
            cell.stopped = bool(cell.refused)

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        for cell in self.cells:
            trial = None if cell.running or cell.stopped else self._next_trial(cell)
            if trial is not None and has_time(trial):
                cell.running = trial
                self.statuses[trial] = JobStatus("running")
                return trial
        return None

    def _next_trial(self, cell: SearchCell) -> Job | None:
        """Return the next trial to run, or None. Read the results of finished trials from their run directories."""
        while (batch := next_batch([*cell.trials.values()], self.candidates(cell), cell.seed)) is not None:
            trial = self._job(cell, batch)
            status = self.resumed(trial)
            if status.state == "running":  # another process runs it, and the next session reads its result
                self.statuses[trial] = status
                cell.stopped = True
                return None
            crowded = status.state == "oom" and not is_batch_too_large(trial.run)
            if (self.options.force or crowded) and trial not in self.statuses:
                status = PENDING
            if not status.done:
                return trial
            self._add_trial(cell, trial, status)
        return None

    def ended(self, job: Job) -> None:
        (cell,) = (cell for cell in self.cells if cell.running == job)
        cell.running = None
        status = read_status(job.run)
        if status.done and not self.is_retried(job, status):
            self._add_trial(cell, job, status)
        elif not status.done:
            self.statuses[job] = status
            cell.stopped = True

    def _add_trial(self, cell: SearchCell, trial: Job, status: JobStatus) -> None:
        self.record(trial, status)
        cell.trials[trial.spec.train.batch_size] = trial_of(trial, status)

    def candidates(self, cell: SearchCell) -> list[int]:
        """Return the allowed batch sizes. A batch size must not be larger than the dataset. The number of sequences per
        step must be a multiple of the group size (grpo)."""
        accumulation, group = cell.spec.train.gradient_accumulation_steps, cell.spec.objective.group
        allowed = [batch for batch in range(1, LARGEST_BATCH + 1) if batch * accumulation % group == 0]
        limit = self._samples(cell)
        return [batch for batch in allowed if limit is None or batch <= limit] or allowed[:1]

    def _samples(self, cell: SearchCell) -> int | None:
        """Return the number of samples in the dataset, from a trial or the spec. Return None for generated data."""
        if cell.spec.dataset.is_generated:
            return None
        datasets = (read_json(self._job(cell, batch).run.applied).get("dataset", {}) for batch in cell.trials)
        return next((int(each["samples"]) for each in datasets if each.get("samples")), cell.spec.dataset.samples)

    def results(self) -> list[tuple[SearchCell, list[Trial], SearchResult]]:
        """Return (cell, finished trials in the order of their batch sizes, result of the search) for each cell."""
        results = []
        for cell in self.cells:
            trials = [cell.trials[batch] for batch in sorted(cell.trials)]
            limit = search_result(trials, self.candidates(cell), cell.seed)
            results.append((cell, trials, replace(limit, note=cell.refused) if cell.refused else limit))
        return results

    def as_dicts(self) -> list[dict[str, Any]]:
        return [
            {"cell": cell.values, "method": cell.spec.method.name, **asdict(result)}
            | {"trials": list(map(asdict, trials))}
            for cell, trials, result in self.results()
        ]

    def _job(self, cell: SearchCell, batch: int) -> Job:
        spec = cell.spec
        changes: dict[str, Any] = {
            "train.batch_size": batch, "train.gradient_accumulation_steps": spec.train.gradient_accumulation_steps,
            **TRIAL,
        }  # fmt: skip
        if spec.dataset.is_generated:
            changes["dataset.samples"] = max(spec.dataset.samples or 0, batch)
        trial = with_changes(spec, changes | {"measure.repeats": 1})
        sets = (f"{key}={'on' if value is True else value}" for key, value in changes.items())
        values = cell.values | {"train.batch_size": batch}
        trial_job = job(trial, (*cell.sets, *sets), values, 1, self.options.folder, self.options.gpu)
        return replace(trial_job, without_batch=identity.fingerprint_without_batch(spec, self.options.gpu))


def trial_of(job: Job, status: JobStatus) -> Trial:
    """Return the trial of a finished job: whether the batch fits, and its speed and memory."""
    batch = job.spec.train.batch_size
    if status.state == "oom":
        if not is_batch_too_large(job.run):
            return Trial(batch, None, reason="out of memory while others used the GPU")
        return Trial(batch, False, reason=status.reason, oom=read_json(job.run.state).get("oom"))
    if status.state not in ("ok", NOT_FINITE):
        return Trial(batch, None, reason=status.reason)
    summary = read_summary(job.run)
    return Trial(batch, True, summary["tokens_per_s"].get("real"), summary["memory_gb"].get("reserved_peak"))
