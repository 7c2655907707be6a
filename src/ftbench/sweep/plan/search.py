"""What to run next in the search for the largest batch. The run directories say which trials are done already, as in a
grid (`plan/grid.py`)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ftbench.core.units import some
from ftbench.errors import SpecError
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import NOT_FINITE, first_gpu, read_json
from ftbench.store.summary import read_summary
from ftbench.sweep.jobs import PENDING, Job, Standing, blames_the_batch, job, on_resume, read_standing
from ftbench.sweep.plan import frontier
from ftbench.sweep.plan.base import Options, Plan

LARGEST_BATCH = 4096


@dataclass(slots=True)
class Family:
    """One cell whose batch size is searched: what its trials train but for the batch, and what names it. `trials` are
    those that have ended, by batch; `running` is the one that is on, `seed` the batch that is expected to fit."""

    spec: Experiment
    sets: tuple[str, ...]
    values: dict[str, Any]
    refused: str | None = None
    trials: dict[int, frontier.Trial] = field(default_factory=dict)
    running: Job | None = None
    stopped: bool = False
    seed: int | None = None


class Search(Plan):
    """For each family the frontier of batch sizes: its trials are runs like any other and found again."""

    def __init__(
        self,
        families: Iterable[Family],
        options: Options,
        steps: int,
        effective: int | None,
        gpu: dict[str, Any] | None = None,
    ) -> None:
        """Take `gpu` from the machine.json of the machine on which the trials run. Raise SpecError where the effective
        batch holds no whole groups of completions."""
        super().__init__(options)
        self.families = list(families)
        self._steps, self._effective = steps, effective
        for family in self.families:
            if effective and effective % (group := family.spec.objective.group):
                raise SpecError(f"--effective-batch {effective}: a step holds groups of {group}: take a multiple of it")
            family.seed = _first_trial(family.spec, gpu, options.folder.parent)
            family.stopped = bool(family.refused)

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        for family in self.families:
            if family.running or family.stopped:
                continue
            trial = self._next_trial(family)
            if trial is not None and has_time(trial):
                family.running = trial
                self.standings[trial] = Standing("running")
                return trial
        return None

    def _next_trial(self, family: Family) -> Job | None:
        """Return the next trial that is to be run; take those that were run before from their directories."""
        trials = family.trials
        while (batch := frontier.next_batch([*trials.values()], self.candidates(family), family.seed)) is not None:
            trial = self._job(family, batch)
            now = on_resume(read_standing(trial.run), self.options.retry_failed)
            if now.state == "running":  # in another process: a later sitting reads how it ended
                self.standings[trial] = now
                family.stopped = True
                return None
            crowded = now.state == "oom" and not blames_the_batch(trial.run)
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
        if self.begins_again(job, now):
            return
        if now.done:
            self._add_trial(family, job, now)
        else:
            self.standings[job] = now
            family.stopped = True

    def _add_trial(self, family: Family, trial: Job, now: Standing) -> None:
        self.record(trial, now)
        family.trials[trial.spec.train.batch_size] = trial_of(trial, now)

    def candidates(self, family: Family) -> list[int]:
        """Return the batch sizes that may be tried: up to the samples there are, divisors of the effective batch where
        that is held, and such that a step holds whole groups."""
        spec, batches = family.spec, range(1, (self._effective or LARGEST_BATCH) + 1)
        every = [batch for batch in batches if not self._effective or self._effective % batch == 0]
        times, group = spec.train.gradient_accumulation_steps, spec.objective.group
        every = [batch for batch in every if (self._effective or batch * times) % group == 0]
        limit = self._samples(family)
        return [batch for batch in every if limit is None or batch <= limit] or every[:1]

    def limited_by(self, family: Family) -> str:
        """Return what ends the candidates, as a sentence."""
        samples = self._samples(family)
        if samples is not None and samples < (self._effective or LARGEST_BATCH):
            return f"the data set has {some(samples, 'sample')}"
        return f"{self._effective or LARGEST_BATCH:,} is the largest batch tried"

    def _samples(self, family: Family) -> int | None:
        """Return how many samples there are, as the spec or the first trial says; None for synthetic ones, of which
        there are as many as are needed."""
        if family.spec.dataset.is_made:
            return None
        for batch in family.trials:
            described = read_json(self._job(family, batch).run.applied).get("dataset", {})
            if described.get("samples"):
                return int(described["samples"])
        return family.spec.dataset.samples

    def edges(self) -> list[tuple[Family, list[frontier.Trial], frontier.Edge]]:
        """Return what is known of each family's frontier."""
        edges = []
        for family in self.families:
            trials = sorted(family.trials.values(), key=lambda trial: trial.batch)
            edge = frontier.edge(trials, self.candidates(family), self.limited_by(family), family.seed)
            edges.append((family, trials, replace(edge, note=family.refused) if family.refused else edge))
        return edges

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the edges, for a file."""
        return [
            {"cell": family.values, "method": family.spec.method.name, **asdict(edge)}
            | {"trials": list(map(asdict, trials))}
            for family, trials, edge in self.edges()
        ]

    def _job(self, family: Family, batch: int) -> Job:
        spec = family.spec
        accumulation = self._effective // batch if self._effective else spec.train.gradient_accumulation_steps
        changes: dict[str, dict[str, Any]] = {
            "train": {
                "batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": self._steps,
            },
            "dataset": {"longest_first": True},
            "measure": {"eval": "off", "profile": "off", "generate": None, "repeats": 1},
        }  # fmt: skip
        if spec.dataset.is_made:
            changes["dataset"]["samples"] = max(spec.dataset.samples or 0, batch)
        sections = {name: getattr(spec, name).model_copy(update=values) for name, values in changes.items()}
        made = job(
            spec.model_copy(update=sections), (*family.sets, *_settings(spec, changes)),
            family.values | {"train.batch_size": batch}, 1, self.options.folder, self.options.gpu,
        )  # fmt: skip
        return replace(made, family=identity.fingerprint_without_batch(spec, self.options.gpu))


def _first_trial(spec: Experiment, gpu: dict[str, Any] | None, folder: Path) -> int | None:
    """Return the batch that is expected to fit; None without the estimator."""
    try:
        from ftbench.estimate import api
    except ImportError:
        return None
    return api.first_trial(spec, gpu, folder, LARGEST_BATCH)


def _settings(spec: Experiment, changes: dict[str, dict[str, Any]]) -> list[str]:
    """Return the changes as `--set` takes them, without those that change nothing."""
    unchanged = {"measure.repeats"}  # --set of one run says nothing of repeats
    unchanged |= {f"measure.{key}" for key in ("profile", "generate") if getattr(spec.measure, key) in ("off", None)}
    words = {None: "off", True: "on"}
    return [
        f"{section}.{key}={value if type(value) is int else words.get(value, value)}"
        for section, values in changes.items() for key, value in values.items()
        if f"{section}.{key}" not in unchanged
    ]  # fmt: skip


def trial_of(job: Job, now: Standing) -> frontier.Trial:
    """Return what the finished run of a job says about its batch."""
    batch = job.spec.train.batch_size
    if now.state == "oom":
        if not blames_the_batch(job.run):
            return frontier.Trial(batch, None, reason="out of memory while others used the GPU")
        return frontier.Trial(batch, False, reason=now.reason, oom=read_json(job.run.state).get("oom"))
    if now.state not in ("ok", NOT_FINITE):
        return frontier.Trial(batch, None, reason=now.reason)
    summary = read_summary(job.run)
    reserved, device = (summary["memory_gb"].get(name) for name in ("reserved_peak", "device_peak"))
    return frontier.Trial(
        batch,
        True,
        speed=summary["tokens_per_s"].get("real"),
        peak_gb=reserved,
        beside_gb=max(0.0, device - reserved) if device is not None and reserved is not None else None,
        capacity_gb=first_gpu(read_json(job.run.machine)).get("memory_gb"),
    )
