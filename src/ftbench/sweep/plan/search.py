"""What to run next in the search for the largest batch. The run directories say which trials are done already, as in a
grid (`plan.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftbench.estimate import preflight
from ftbench.report.data.collect import summary_of
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import first_gpu, read_json
from ftbench.sweep.execute.budget import History
from ftbench.sweep.jobs import PENDING, Job, Standing, blames_the_batch, job, on_resume, standing
from ftbench.sweep.plan import frontier
from ftbench.sweep.plan.grid import KILLS, Options

LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Family:
    """One cell whose batch size is searched: what its trials train but for the batch, and what names it."""

    spec: Experiment
    sets: tuple[str, ...]
    values: dict[str, Any]
    refused: str | None = None


class Search:
    """For each family the frontier of batch sizes: its trials are runs like any other and found again."""

    def __init__(
        self,
        families: Iterable[Family],
        options: Options,
        steps: int,
        effective: int | None,
        gpu: dict[str, Any] | None = None,
    ) -> None:
        """`gpu` is the one of machine.json, on which the trials run."""
        self.history = History()
        self.standings: dict[Job, Standing] = {}
        self.families = list(families)
        self._options, self._steps, self._effective = options, steps, effective
        self._seeds = [preflight.first_trial(family.spec, gpu, LARGEST_BATCH) for family in self.families]
        self._trials: dict[int, dict[int, frontier.Trial]] = {place: {} for place in range(len(self.families))}
        self._busy: dict[Job, int] = {}
        self._kills: Counter[Job] = Counter()
        self._stopped: set[int] = {place for place, family in enumerate(self.families) if family.refused}

    def next(self, fits: Callable[[Job], bool]) -> Job | None:
        for place in range(len(self.families)):
            if place in self._busy.values() or place in self._stopped:
                continue
            if (found := self._advance(place)) is not None and fits(found):
                self._busy[found] = place
                self.standings[found] = Standing("running")
                return found
        return None

    def _advance(self, place: int) -> Job | None:
        """The next trial that is to be run; those that were run before are taken from their directories."""
        while (batch := self._next_batch(place)) is not None:
            wanted = self._job(self.families[place], batch)
            found = on_resume(standing(wanted.run), self._options.retry_failed)
            if found.state == "running":  # in another process: a later sitting reads how it ended
                self.standings[wanted] = found
                self._stopped.add(place)
                return None
            crowded = found.state == "oom" and not blames_the_batch(wanted.run)
            if (self._options.force or crowded) and wanted not in self.standings:
                found = PENDING
            if not found.done:
                return wanted
            self._note(wanted, place, found)
        return None

    def _next_batch(self, place: int) -> int | None:
        return frontier.next_batch(list(self._trials[place].values()), self.candidates(place), self._seeds[place])

    def ended(self, job: Job) -> None:
        place = self._busy.pop(job)
        found = standing(job.run)
        if found.killed and self._kills[job] < KILLS:
            self._kills[job] += 1
            self.standings[job] = PENDING
            return
        if found.done:
            self._note(job, place, found)
        else:
            self.standings[job] = found
            self._stopped.add(place)

    def pending(self) -> Collection[Job]:
        return []  # how many trials there will be is not known before they have run

    def candidates(self, place: int) -> list[int]:
        """Batch sizes that may be tried: up to the samples there are, and divisors of the effective batch where that
        is held."""
        if self._effective:
            every = [batch for batch in range(1, self._effective + 1) if self._effective % batch == 0]
        else:
            every = list(range(1, LARGEST_BATCH + 1))
        limit = self._samples(place)
        return [batch for batch in every if limit is None or batch <= limit] or every[:1]

    def limited_by(self, place: int) -> str:
        samples = self._samples(place)
        if samples is not None and samples < (self._effective or LARGEST_BATCH):
            return f"the data set has {samples:,} samples"
        return f"{self._effective or LARGEST_BATCH:,} is the largest batch tried"

    def _samples(self, place: int) -> int | None:
        """How many samples there are: as asked for, or as the first trial found. Synthetic ones can be had as many as
        are needed."""
        family = self.families[place]
        if family.spec.dataset.name == "synthetic":
            return None
        for batch in self._trials[place]:
            described = read_json(self._job(family, batch).run.applied).get("dataset", {})
            if described.get("samples"):
                return int(described["samples"])
        return family.spec.dataset.samples

    def edges(self) -> list[tuple[Family, list[frontier.Trial], frontier.Edge]]:
        """What is known of each family's frontier."""
        found = []
        for place, family in enumerate(self.families):
            trials = sorted(self._trials[place].values(), key=lambda trial: trial.batch)
            edge = frontier.edge(trials, self.candidates(place), self.limited_by(place), self._seeds[place])
            found.append((family, trials, replace(edge, note=family.refused) if family.refused else edge))
        return found

    def as_dicts(self) -> list[dict[str, Any]]:
        """The edges, for a file."""
        return [
            {
                "cell": family.values,
                "method": family.spec.method.name,
                **asdict(edge),
                "trials": list(map(asdict, trials)),
            }
            for family, trials, edge in self.edges()
        ]

    def _job(self, family: Family, batch: int) -> Job:
        accumulation = self._effective // batch if self._effective else family.spec.train.gradient_accumulation_steps
        train = {"batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": self._steps}
        dataset: dict[str, Any] = {"longest_first": True}
        if family.spec.dataset.name == "synthetic":
            dataset["samples"] = max(family.spec.dataset.samples or 0, batch)
        spec = family.spec.model_copy(
            update={
                "train": family.spec.train.model_copy(update=train),
                "dataset": family.spec.dataset.model_copy(update=dataset),
                "measure": family.spec.measure.model_copy(
                    update={"eval": "off", "repeats": 1, "profile": "off", "generate": None}
                ),
            }
        )
        trial: dict[str, Any] = {f"train.{key}": value for key, value in train.items()}
        trial |= {f"dataset.{key}": value for key, value in dataset.items()} | {"measure.eval": "off"}
        if family.spec.measure.profile != "off":
            trial |= {"measure.profile": "off"}
        if family.spec.measure.generate is not None:
            trial |= {"measure.generate": "off"}
        sets = (*family.sets, *(f"{key}={'on' if value is True else value}" for key, value in trial.items()))
        values = family.values | {"train.batch_size": batch}
        made = job(spec, sets, values, 1, self._options.folder, self._options.gpu)
        return replace(made, family=identity.family(family.spec, self._options.gpu))

    def _note(self, each: Job, place: int, found: Standing) -> None:
        self.standings[each] = found
        if found.state in ("ok", "timeout") and found.wall_s is not None:
            self.history.add(each, found.wall_s)
        self._trials[place][each.spec.train.batch_size] = trial_of(each, found)


def trial_of(job: Job, found: Standing) -> frontier.Trial:
    """What the finished run of a job says about its batch."""
    batch = job.spec.train.batch_size
    if found.state == "oom":
        if not blames_the_batch(job.run):
            return frontier.Trial(batch, None, reason="out of memory while others used the GPU")
        return frontier.Trial(batch, False, reason=found.reason, oom=read_json(job.run.state).get("oom"))
    if found.state != "ok":
        return frontier.Trial(batch, None, reason=found.reason)
    summary, memory = summary_of(job.run), {}
    memory = summary["memory_gb"]
    reserved, device = memory.get("reserved_peak"), memory.get("device_peak")
    return frontier.Trial(
        batch,
        True,
        speed=summary["tokens_per_s"].get("real"),
        peak_gb=reserved,
        beside_gb=max(0.0, device - reserved) if device is not None and reserved is not None else None,
        capacity_gb=first_gpu(read_json(job.run.machine)).get("memory_gb"),
    )
