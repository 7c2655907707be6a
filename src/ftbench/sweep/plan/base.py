"""What every plan of a sweep has: where its jobs stand, how long they took, which were killed from outside."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftbench.store.rundir import NOT_FINITE
from ftbench.sweep.jobs import PENDING, Job, Standing
from ftbench.sweep.plan.budget import WallTimes, duration

KILLS = 2  # how often in a sitting a run that somebody killed is begun again


@dataclass(frozen=True, slots=True)
class Options:
    """`folder` is the experiment's; `gpu` the GPU's name; `sets` the changes to the spec file that all cells share."""

    folder: Path
    gpu: str | None
    sets: tuple[str, ...] = ()
    retry_failed: bool = False
    force: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """What every command says that runs a plan; `time_budget` as `8h`."""

    spec: Path
    sets: Sequence[str] = ()
    out: Path = Path("results")
    time_budget: str | None = None
    retry_failed: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        _ = self.limit_s  # raises SpecError for a time budget that is none

    @property
    def limit_s(self) -> float | None:
        return None if self.time_budget is None else duration(self.time_budget)

    def options(self, folder: Path, gpu: str | None, sets: Sequence[str]) -> Options:
        """Return the options of a plan in the folder of an experiment, on the GPU of that name."""
        return Options(folder, gpu, tuple(sets), self.retry_failed, self.force)


class Plan:
    """`standings` holds every job known so far, in the order of the table."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.standings: dict[Job, Standing] = {}
        self.wall_times = WallTimes()
        self._kills: Counter[Job] = Counter()

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        """Return a job to start now, or None where nothing can start; `has_time` says whether there is time for it."""
        raise NotImplementedError

    def ended(self, job: Job) -> None:
        """Take note of what the directory of a job says that was started."""
        raise NotImplementedError

    def pending(self) -> Collection[Job]:
        """Return the jobs that wait, as far as they are known."""
        return ()

    def left(self) -> int:
        """Return how many jobs are not done."""
        return sum(not standing.done for standing in self.standings.values())

    def record(self, job: Job, standing: Standing) -> None:
        """Take note of where a job stands, and of how long it took."""
        self.standings[job] = standing
        if standing.state in ("ok", "timeout", NOT_FINITE) and standing.wall_s is not None:
            self.wall_times.add(job, standing.wall_s)

    def begins_again(self, job: Job, standing: Standing) -> bool:
        """Return whether a job that somebody killed is pending again."""
        if not standing.killed or self._kills[job] >= KILLS:
            return False
        self._kills[job] += 1
        self.standings[job] = PENDING
        return True
