"""`ftbench run`."""

from __future__ import annotations

from pathlib import Path

import typer

from ftbench.cli.shared import Json, Out, Sets, Spec, app, emit, train


@app.command()
def run(spec: Spec, sets: Sets = None, out: Out = Path("results"), as_json: Json = False) -> None:
    """Train once, record every step, print the card."""
    from ftbench.report.card import card

    result = train(spec, sets or [], out)
    emit(result.document() if as_json else card(result.summary, result.run))
    raise typer.Exit(result.exit_code)
