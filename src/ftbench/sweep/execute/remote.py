"""What all clusters share: what a node says of itself, a run on it, and the end of a run that it never ended."""

from collections.abc import Callable
from typing import Any

from ftbench.errors import FtbenchError
from ftbench.launch import process, runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.sweep.execute.gpu_slots import LocalSlot, RunControl


def describe(values: dict[str, Any], visible: str | None = None) -> dict[str, Any]:
    """Return, on a node, its machine.json with its first GPU."""
    return runner.describe(Experiment.model_validate(values), visible)


def train(
    claim_run: Callable[[], RunDir],
    order: Order,
    shared: bool,
    say: Callable[[str], None],
    deadline: float | None = None,
) -> FinishedRun:
    """Train, on a node, in the directory that `claim_run` makes; TERM, and `deadline` (monotonic clock, s), end it."""
    with process.signals() as stop_pipe:
        control = RunControl(stop_pipe, deadline, say, lambda text: None)
        return LocalSlot("GPU", shared=shared).train(claim_run, order, control)


def ended(run: RunDir, state: str, reason: str, **more: Any) -> FinishedRun:
    """Write down how a claimed run ended of which its node said nothing."""
    rundir.write_json(
        run.state, {"schema": rundir.SCHEMA, "state": state, "reason": reason, "ended_at": rundir.now(), **more}
    )
    run.reserve.unlink(missing_ok=True)
    return finished(run)


def finished(run: RunDir) -> FinishedRun:
    """Return a run whose files are there."""
    summarised = summary.summarise(run)
    return FinishedRun(run, summarised, 0 if summarised.state == "ok" else FtbenchError.exit_code)
