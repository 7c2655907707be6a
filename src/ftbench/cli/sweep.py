"""`ftbench sweep`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftbench.cli.shared import Budget, DryRun, Force, Json, Out, Retry, Sets, app, emit, run_plan, tell
from ftbench.errors import SpecError

if TYPE_CHECKING:
    from ftbench.sweep.command import SweepRequest


@app.command()
def sweep(
    spec: Annotated[Path | None, typer.Argument(help="YAML file, with its `sweep:` section or with axes below")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    axis: Annotated[list[str] | None, typer.Option(help="a key and its values", metavar="KEY=V,V")] = None,
    batch_size: Annotated[str | None, typer.Option(help="the axis train.batch_size", metavar="1,2,4")] = None,
    method: Annotated[str | None, typer.Option(help="the axis method", metavar="lora,qlora")] = None,
    repeats: Annotated[int | None, typer.Option(help="runs of each cell, interleaved: measure.repeats")] = None,
    until_oom: Annotated[bool, typer.Option("--until-oom", help="find the largest batch that fits")] = False,
    trial_steps: Annotated[int, typer.Option(min=3, help="--until-oom: optimizer steps of each trial")] = 7,
    effective_batch: Annotated[
        int | None, typer.Option(min=1, help="--until-oom: samples a step, held by accumulation")
    ] = None,
    time_budget: Budget = None,
    retry_failed: Retry = False,
    force: Force = False,
    gpus: Annotated[
        str | None, typer.Option(help="several single-GPU runs at once, one on each of these", metavar="0,1")
    ] = None,
    on: Annotated[str | None, typer.Option(help="a Ray cluster: ray, or ray://host:port", metavar="ray")] = None,
    dry_run: DryRun = False,
    status: Annotated[Path | None, typer.Option(help="where the sweep in this folder stands", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Run every cell of a grid, each in a process of its own; goes on where it stopped."""
    if status is not None:
        _print_status(status, as_json)
        return
    if spec is None:
        raise SpecError("sweep: name a spec file, or ask for a running sweep with --status DIR")
    from ftbench.sweep import command

    request = command.SweepRequest(
        spec, [*(sets or []), *([f"measure.repeats={repeats}"] if repeats is not None else [])],
        _axes({"method": method, "train.batch_size": batch_size}, axis or []), out, until_oom, trial_steps,
        effective_batch, time_budget, retry_failed, force, _gpus(gpus), on,
    )  # fmt: skip
    _run(request, dry_run, as_json)


def _print_status(folder: Path, as_json: bool) -> None:
    from ftbench.sweep.output import status

    board = status.status(folder)
    emit(board if as_json else status.as_text(board))


def _axes(options: dict[str, str | None], axes: list[str]) -> list[str]:
    """Return the axes of the command line, those with an option of their own first. Raise SpecError for a key that is
    named twice: one of the two would be dropped."""
    every = [*(f"{key}={values}" for key, values in options.items() if values is not None), *axes]
    keys = [text.partition("=")[0].strip() for text in every]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise SpecError(f"--axis {twice[0]}: stands on the command line twice; give all its values at once")
    return every


def _gpus(text: str | None) -> list[str]:
    gpus = [gpu.strip() for gpu in text.split(",") if gpu.strip()] if text is not None else []
    if text is not None and not gpus:
        raise SpecError(f"--gpus {text}: name GPUs by number, for example --gpus 0,1")
    return gpus


def _run(request: SweepRequest, dry_run: bool, as_json: bool) -> None:
    from ftbench.sweep import command

    with contextlib.ExitStack() as stack:
        ready = command.prepare(request, stack)
        for note in ready.notes:
            tell(f"ftbench: note: {note}")
        code, _ = run_plan(ready, dry_run, as_json)
    raise typer.Exit(code)
