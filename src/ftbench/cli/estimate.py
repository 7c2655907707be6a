"""`ftbench estimate` and `ftbench recommend`: what a training needs, before it is one."""

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Config, Json, Prices, Sets, Spec, Store, Wide, app, emit, write_result


@app.command()
def estimate(
    spec: Spec,
    sets: Sets = None,
    gpu: Annotated[
        str | None, typer.Option(help="NAME,NAME of `ftbench list gpus`, or all; this machine's if left out")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GiB of a GPU that is in no table")] = None,
    gpus: Annotated[int | None, typer.Option(help="how many GPUs share the work, if not the spec's")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="how they share it: ddp, fsdp, zero1 to zero3, tp, tp+fsdp, ep, cp; or all")
    ] = None,
    config: Config = None,
    check: Annotated[
        bool, typer.Option("--check", help="exit code 0 fits, 1 uncertain, 2 does not (of GPUs the best)")
    ] = False,
    samples: Annotated[float | None, typer.Option(help="how many to train on, if not the spec's")] = None,
    hours: Annotated[float | None, typer.Option(help="how long a night is (8)")] = None,
    prices: Prices = None,
    store: Store = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Say what memory and time a spec needs, and whether it fits. Nothing is trained."""
    from ftbench.estimate import command

    request = command.EstimateRequest(
        spec, sets or [], gpu, memory_gb, gpus, strategy, config, samples, hours, prices, store
    )
    answer = command.estimate(request)
    emit(answer.document if as_json else answer.text)
    raise typer.Exit(answer.code if check else 0)


@app.command()
def data(spec: Spec, sets: Sets = None, as_json: Json = False) -> None:
    """Show a spec's data set as a model would see it. Its lengths, what is cut, what packing brings, three samples."""
    from ftbench.estimate import preview

    document = preview.preview(spec, sets or [])
    emit(document if as_json else preview.as_text(document))


@app.command()
def recommend(
    spec: Spec,
    sets: Sets = None,
    gpu: Annotated[str | None, typer.Option(help="NAME,NAME or all; this machine's if left out")] = None,
    gpus: Annotated[int | None, typer.Option(help="how many there are to share the work, if not the spec's")] = None,
    samples: Annotated[int | None, typer.Option(help="how many to train on, if not the spec's")] = None,
    deadline: Annotated[str | None, typer.Option(help="done within this time", metavar="8h")] = None,
    max_cost: Annotated[float | None, typer.Option(help="for at most this much money, by --prices")] = None,
    prices: Prices = None,
    goal: Annotated[str, typer.Option(help="what is best: speed, cost, energy or memory")] = "speed",
    method: Annotated[str | None, typer.Option(help="lora,full: to choose from, if not the spec's kind")] = None,
    effective_batch: Annotated[
        str | None,
        typer.Option(help="samples a step, held by accumulation: N or any; the spec's if left out"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best as a spec to run")] = None,
    config: Config = None,
    store: Store = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the best method, batch and GPU for a time and a budget. And the optimizations; 1 if nothing is found."""
    from ftbench.estimate.recommend import command
    from ftbench.estimate.recommend import text as view

    answer = command.run(command.RecommendRequest(
        spec, sets or [], gpu, gpus, samples, deadline, max_cost, prices, goal, method, effective_batch, store,
        output, config,
    ))  # fmt: skip
    emit(view.as_json(answer) if as_json else view.as_text(answer, output), end="")
    if output is not None and answer.options:
        write_result(view.as_yaml(answer), output)
    raise typer.Exit(0 if answer.options else 1)
