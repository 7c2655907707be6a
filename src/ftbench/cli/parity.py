"""`ftbench parity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Budget, DryRun, Force, Json, Out, Retry, Sets, Spec, app, run_plan


@app.command()
def parity(
    spec: Spec,
    against: Annotated[str, typer.Option(help="the reference: a recipe, or a file with one")] = "plain",
    recipe: Annotated[
        str | None, typer.Option(help="recipes to judge; the spec as it is if empty", metavar="A,B")
    ] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    seeds: Annotated[int, typer.Option(min=1, max=20, help="seeds of each recipe")] = 3,
    steps: Annotated[int | None, typer.Option(min=6, help="optimizer steps of each run: train.max_steps")] = None,
    gradients: Annotated[int, typer.Option(min=0, max=20, help="first steps whose gradients are compared")] = 3,
    parallel: Annotated[int, typer.Option(min=1, max=8, help="runs side by side on the GPU: speed is nobody's")] = 1,
    time_budget: Budget = None,
    retry_failed: Retry = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train recipes and a reference over several seeds, with controls that must fail: do they learn the same?"""
    from ftbench.sweep import parity as command

    names = [name.strip() for name in recipe.split(",")] if recipe is not None else []
    request = command.ParityRequest(
        spec, against, names, sets or [], out, seeds, steps, gradients, parallel, time_budget, retry_failed, force
    )
    code, _ = run_plan(command.prepare(request), dry_run, as_json)
    raise typer.Exit(code)
