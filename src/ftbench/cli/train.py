"""`ftbench run` and `ftbench profile`: one spec, trained once."""

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, LogEvery, Out, Sets, Spec, Yes, app, emit, train


@app.command()
def run(
    spec: Spec, sets: Sets = None, out: Out = Path("results"), log_every: LogEvery = "60s", yes: Yes = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train once, record every step, print the card."""
    from ftbench.report.show import shown

    result = train(spec, sets or [], out, log_every, yes)
    emit(result.document() if as_json else shown(result.run, out).text())
    raise typer.Exit(result.exit_code)


@app.command()
def profile(
    spec: Spec,
    sets: Sets = None,
    out: Out = Path("results"),
    steps: Annotated[int | None, typer.Option(min=1, max=20, help="how many steps (measure.profile_steps)")] = None,
    log_every: LogEvery = "60s",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Record what a few steady steps do, kernel by kernel. Kernels by group, idle gaps and their cause, memory by what
    it is for."""
    from ftbench.profile import command
    from ftbench.report.card import card

    count = [f"measure.profile_steps={steps}"] if steps is not None else []
    result = train(spec, ["measure.profile=on", *count, *(sets or [])], out, log_every, yes)
    if as_json:
        emit(result.document() | {"profile": command.document(result.run)})
    else:
        emit(command.as_text(result.run) or card(result.summary, result.run))
    raise typer.Exit(result.exit_code)
