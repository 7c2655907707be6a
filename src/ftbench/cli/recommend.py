"""`ftbench recommend`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Config, Json, Prices, Sets, Spec, Store, app, deliver, emit


@app.command()
def recommend(
    spec: Spec,
    sets: Sets = None,
    gpu: Annotated[str | None, typer.Option(help="NAME,NAME or all; this machine's if left out")] = None,
    samples: Annotated[int | None, typer.Option(help="how many to train on, if not the spec's")] = None,
    deadline: Annotated[str | None, typer.Option(help="done within this time", metavar="8h")] = None,
    max_cost: Annotated[float | None, typer.Option(help="for at most this much money, by --prices")] = None,
    prices: Prices = None,
    objective: Annotated[str, typer.Option(help="what is best: speed, cost, energy or memory")] = "speed",
    method: Annotated[str | None, typer.Option(help="lora,full: to choose from, if not the spec's kind")] = None,
    effective_batch: Annotated[
        str | None,
        typer.Option(help="samples a step, held by accumulation: N or any; the spec's if left out"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best as a spec to run")] = None,
    config: Config = None,
    store: Store = Path("results"),
    as_json: Json = False,
) -> None:
    """Find the best method, optimizations, batch and GPU within a time and a budget; 1 if nothing is."""
    from ftbench.estimate.recommend import command
    from ftbench.estimate.recommend import text as view

    answer = command.run(command.RecommendRequest(
        spec, sets or [], gpu, samples, deadline, max_cost, prices, objective, method, effective_batch, store, output,
        config,
    ))  # fmt: skip
    emit(view.as_json(answer) if as_json else view.as_text(answer), end="")
    if output is not None and answer.options:
        deliver(view.as_yaml(answer), output)
    raise typer.Exit(0 if answer.options else 1)
