"""`ftbench ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Budget, DryRun, Force, Json, Out, Retry, Sets, Spec, app, run_plan


@app.command()
def ablate(
    spec: Spec,
    sets: Sets = None,
    out: Out = Path("results"),
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each run: train.max_steps")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs of each variant, interleaved")] = 3,
    only: Annotated[str | None, typer.Option(help="these optimizations or variants alone", metavar="A,B")] = None,
    objective: Annotated[str, typer.Option(help="what the best combination is best for: speed or memory")] = "speed",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best combination as a spec")] = None,
    time_budget: Budget = None,
    retry_failed: Retry = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run the plain recipe, then one optimization at a time, then what helped together: what each brings."""
    from ftbench.sweep import ablate as command

    names = [name.strip() for name in only.split(",")] if only is not None else []
    request = command.AblationRequest(
        spec, sets or [], out, steps, repeats, names, objective, time_budget, retry_failed, force
    )  # fmt: skip
    if output is not None:
        command.check_output(request, output)
    code, tables = run_plan(command.prepare(request), dry_run, as_json)
    if output is not None:
        command.write_best(request, tables, output)
    raise typer.Exit(code)
