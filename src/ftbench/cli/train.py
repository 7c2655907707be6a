"""`ftbench run` and `ftbench profile`: train one spec once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftbench.cli.shared import Data, Json, Length, LogEvery, Out, Recipe, Sets, Spec, Yes, command, emit, log
from ftbench.errors import MissingError

if TYPE_CHECKING:
    from ftbench.launch.progress import Progress
    from ftbench.launch.runner import FinishedRun
    from ftbench.spec.experiment import Experiment


@command()
def run(
    spec: Spec, recipe: Recipe = None, dataset: Data = None, length: Length = None, sets: Sets = None,
    out: Out = Path("results"), log_every: LogEvery = "60s", yes: Yes = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train once, record every step, print the result."""
    from ftbench.report.show import shown
    from ftbench.spec.model_argument import spec_sets

    result = _train(spec, spec_sets(sets, recipe, dataset, length), out, log_every, yes)
    emit(result.document() if as_json else shown(result.run).text())
    raise typer.Exit(result.exit_code)


@command()
def profile(
    spec: Spec,
    recipe: Recipe = None,
    dataset: Data = None,
    sets: Sets = None,
    steps: Annotated[int | None, typer.Option(min=1, max=20, help="number of steps (measure.profile_steps)")] = None,
    out: Out = Path("results"),
    log_every: LogEvery = "60s",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Profile a few steps after the warm-up. Print the time of kernels, groups of kernels and phases, and idle time."""
    from ftbench.profile import profile_table
    from ftbench.report import show
    from ftbench.spec.model_argument import spec_sets
    from ftbench.store.rundir import KERNELS, read_json

    count = [f"measure.profile_steps={steps}"] if steps is not None else []
    changes = spec_sets(["measure.profile=on", *count, *(sets or [])], recipe, dataset, None)
    result = _train(spec, changes, out, log_every, yes)
    if as_json:
        emit(result.document() | {"profile": read_json(result.run.profile / KERNELS) or None})
    else:
        emit("\n\n".join(filter(None, [profile_table.run_text(result.run), show.shown(result.run).ending()])))
    raise typer.Exit(result.exit_code)


def _train(spec: Path, sets: list[str], out: Path, log_every: float, yes: bool) -> FinishedRun:
    """Train a spec once and show the progress on stderr. Ask before starting a run that is likely to fail."""
    from ftbench.core.units import seconds
    from ftbench.launch import checks, ranks, runner
    from ftbench.launch.live import LiveView
    from ftbench.spec.load import has_axes, load
    from ftbench.spec.optimizations import compute

    if has_axes(spec, sets):
        log(
            f"ftbench: note: `run` ignores the section `sweep:` of {spec} and trains one run; "
            f"`ftbench sweep {spec}` runs every cell"
        )

    def on_checked(resolved: Experiment, described: dict[str, Any]) -> None:
        if why := compute.kernels_left_out(load(spec, sets), checks.capability(described)):
            log(f"ftbench: note: optimizations.triton_kernels auto is off: {why}")
        _predict(resolved, described, out, yes)
        if resolved.launch.nodes > 1:
            ranks.node_number(resolved)  # raises before the message below
            log("waiting up to 10 minutes for the other machines of the run")

    with LiveView(log_every) as view:

        def show(progress: Progress) -> None:
            view.show([f"{progress.text()} · {seconds(time.monotonic() - progress.begun)} so far"])

        return runner.run(spec, sets, out, lambda run: log(f"run {run.path}"), show, on_checked)


def _predict(spec: Experiment, described: dict[str, Any], out: Path, yes: bool) -> None:
    """Print the prediction for a run. Ask before starting a run that is likely to fail."""
    from ftbench.estimate import api
    from ftbench.store.rundir import first_gpu

    if (problem := api.problem(spec, described, out)) is None:
        if (expected := api.expectation(spec, first_gpu(described) or None, out)) is not None:
            log(expected)
        return
    log(f"ftbench: {problem}")
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    if not yes and not (can_ask and typer.confirm("Run it anyway?", err=True)):
        raise MissingError("nothing was started" + "; use --yes to start it anyway" * (not can_ask))
