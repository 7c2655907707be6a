"""`ftbench sweep`, `ablate` and `parity`: execute many runs. After an interruption, the same command continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ftbench.cli.shared import (
    ADVANCED,
    CLUSTER,
    OUTPUT,
    DryRun,
    Force,
    Json,
    LogEvery,
    Out,
    RetryFailed,
    Sets,
    Spec,
    TimeBudget,
    Wide,
    command,
    emit,
    log,
    of,
)  # fmt: skip
from ftbench.errors import SpecError

if TYPE_CHECKING:
    from ftbench.sweep.sweep import Ready

Gpus = Annotated[str | None, of(CLUSTER, "run one cell at a time on each of these GPUs", "--gpu-ids", metavar="0,1")]
On = Annotated[str | None, of(CLUSTER, "cluster: slurm (with slurm.yaml), ray or ray://host:port", metavar="slurm")]


@command()
def sweep(
    spec: Annotated[
        Path | None, typer.Argument(help="YAML file with a `sweep:` section; or a file or model and options below")
    ] = None,
    method: Annotated[str | None, typer.Option(help="methods to train", metavar="lora,qlora")] = None,
    batch_size: Annotated[str | None, typer.Option(help="batch sizes to train", metavar="1,2,4")] = None,
    until_oom: Annotated[bool, typer.Option("--until-oom", help="find the largest batch that fits")] = False,
    sets: Sets = None,
    dry_run: DryRun = False,
    axis: Annotated[list[str] | None, of(ADVANCED, "another key of the spec and its values", metavar="KEY=V,V")] = None,
    repeats: Annotated[int | None, of(ADVANCED, "interleaved runs per cell: measure.repeats", min=1)] = None,
    time_budget: TimeBudget = None,
    out: Out = Path("results"),
    status: Annotated[Path | None, of(OUTPUT, "show the progress of the sweep in DIR", metavar="DIR")] = None,
    gpus: Gpus = None,
    on: On = None,
    retry_failed: RetryFailed = False,
    force: Force = False,
    log_every: LogEvery = "60s",
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Train every cell of a grid, each in a separate process. The same command resumes an interrupted sweep."""
    from ftbench.sweep import sweep as command

    if status is not None or spec is None:
        _show_status(status, spec, as_json)
        return
    request = command.SweepRequest(
        spec, sets=[*(sets or []), *([f"measure.repeats={repeats}"] if repeats is not None else [])], out=out,
        axes=_axes({"method": method, "train.batch_size": batch_size}, axis or []), time_budget=time_budget,
        retry_failed=retry_failed, force=force, until_oom=until_oom, gpus=_names(gpus), on=on,
    )  # fmt: skip
    ready = command.prepare(request, lambda text: log(f"ftbench: note: {text}"))
    _run_plan(ready, dry_run, log_every, as_json)


def _show_status(folder: Path | None, spec: Path | None, as_json: bool) -> None:
    from ftbench.sweep.output import status as view

    if folder is None:
        raise SpecError("sweep: name a spec file, or use --status DIR to show a running sweep")
    if spec is not None:
        raise SpecError(f"sweep: --status only shows a sweep: remove {spec}")
    board = view.status(folder)
    emit(board if as_json else view.as_text(board))


def _axes(options: dict[str, str | None], axes: list[str]) -> list[str]:
    """Return `key=values` for --method, --batch-size and each --axis. Raise SpecError if a key appears twice."""
    every = [*(f"{key}={values}" for key, values in options.items() if values is not None), *axes]
    keys = [text.partition("=")[0].strip() for text in every]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise SpecError(f"--axis {repeated[0]}: is given twice; give all its values at once")
    return every


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text is not None else []


def _run_plan(ready: Ready, dry_run: bool, log_every: float, as_json: bool) -> None:
    """Execute a plan, print its tables and exit. With `dry_run`, only list the runs."""
    from ftbench.sweep import dry_run as planned
    from ftbench.sweep import sweep as command

    if dry_run:
        if ready.unpublished:
            log(f"ftbench: note: {ready.unpublished}")
        lines = planned.dry_run(ready)
        emit([dataclasses.asdict(line) for line in lines] if as_json else planned.as_text(lines, ready))
        raise typer.Exit
    if total := planned.known_total(ready):
        log(total)
    code, tables = command.run(ready, log_every)
    emit(tables.document() if as_json else tables.terminal(), end="\n" * as_json)
    raise typer.Exit(code)


@command()
def ablate(
    spec: Spec,
    only: Annotated[str | None, typer.Option(help="only these optimizations or variants", metavar="A,B")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps per run: train.max_steps")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="interleaved runs per variant")] = 3,
    sets: Sets = None,
    dry_run: DryRun = False,
    time_budget: TimeBudget = None,
    out: Out = Path("results"),
    retry_failed: RetryFailed = False,
    force: Force = False,
    log_every: LogEvery = "60s",
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Measure the gain of each optimization: train the plain recipe, then the plain recipe with one optimization."""
    from ftbench.sweep import ablate as command

    request = command.AblationRequest(
        spec, steps=steps, repeats=repeats, only=_names(only),
        sets=sets or [], out=out, time_budget=time_budget, retry_failed=retry_failed, force=force,
    )  # fmt: skip
    _run_plan(command.prepare(request), dry_run, log_every, as_json)


@command()
def parity(
    spec: Spec,
    recipe: Annotated[str | None, typer.Option(help="recipes to judge (default: the spec)", metavar="A,B")] = None,
    seeds: Annotated[int, typer.Option(min=0, max=20, help="trainings per recipe; 0: only forward and gradient")] = 3,
    steps: Annotated[int | None, typer.Option(min=6, help="optimizer steps per run: train.max_steps")] = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    controls: Annotated[
        Literal["few", "all"], of(ADVANCED, "controls (runs that must fail): few (one per level), or all")
    ] = "few",
    time_budget: TimeBudget = None,
    out: Out = Path("results"),
    retry_failed: RetryFailed = False,
    force: Force = False,
    log_every: LogEvery = "60s",
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Judge whether recipes learn the same as plain training in float32: losses, gradients and held-out loss."""
    from ftbench.sweep import parity as command

    request = command.ParityRequest(
        spec=spec, recipes=_names(recipe), seeds=seeds, steps=steps, controls=controls,
        sets=sets or [], out=out, time_budget=time_budget, retry_failed=retry_failed, force=force,
    )  # fmt: skip
    _run_plan(command.prepare(request), dry_run, log_every, as_json)
