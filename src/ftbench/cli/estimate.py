"""`ftbench estimate`, `ftbench data` and `ftbench recommend`: predictions before a training."""

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Config, Json, Prices, Sets, Spec, Store, Wide, app, emit, write_result


@app.command()
def estimate(
    spec: Spec,
    sets: Sets = None,
    gpu: Annotated[str | None, typer.Option(help="NAME,NAME or all (default: this machine's)")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GiB of a GPU that is not in the table")] = None,
    gpus: Annotated[int | None, typer.Option(help="number of GPUs (default: the spec's)")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="how they share the work: ddp, fsdp, zero1 to zero3, tp, tp+fsdp, ep, cp; or all")
    ] = None,
    config: Config = None,
    check: Annotated[
        bool, typer.Option("--check", help="exit with 0 if it fits, 1 if uncertain, 2 if not (best GPU)")
    ] = False,
    samples: Annotated[float | None, typer.Option(help="number of samples to train on (default: the spec's)")] = None,
    hours: Annotated[float | None, typer.Option(help="length of a night in hours (default: 8)")] = None,
    prices: Prices = None,
    store: Store = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Estimate the memory and time of a spec, and whether it fits. Nothing is trained."""
    from ftbench.estimate import estimates

    answer = estimates.estimate(estimates.EstimateRequest(
        spec, sets or [], gpu, memory_gb, gpus, strategy, config, samples, hours, prices, store
    ))  # fmt: skip
    emit(answer.document if as_json else answer.text)
    raise typer.Exit(answer.code if check else 0)


@app.command()
def data(spec: Spec, sets: Sets = None, as_json: Json = False) -> None:
    """Show a spec's data set as the model sees it: lengths, truncation, packing gain, three samples."""
    from ftbench.estimate import preview

    document = preview.preview(spec, sets or [])
    emit(document if as_json else preview.as_text(document))


@app.command()
def recommend(
    spec: Spec,
    sets: Sets = None,
    gpu: Annotated[str | None, typer.Option(help="NAME,NAME or all (default: this machine's)")] = None,
    gpus: Annotated[int | None, typer.Option(help="largest number of GPUs (default: the spec's)")] = None,
    samples: Annotated[int | None, typer.Option(help="number of samples to train on (default: the spec's)")] = None,
    deadline: Annotated[str | None, typer.Option(help="time limit", metavar="8h")] = None,
    max_cost: Annotated[float | None, typer.Option(help="cost limit, in the currency of --prices")] = None,
    prices: Prices = None,
    goal: Annotated[str, typer.Option(help="rank by speed, cost, energy or memory")] = "speed",
    method: Annotated[
        str | None,
        typer.Option(help="methods to compare, such as lora,full"),
    ] = None,
    effective_batch: Annotated[
        str | None,
        typer.Option(help="samples per step, reached by accumulation: N or any (default: the spec's)"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best as a spec")] = None,
    every: Annotated[bool, typer.Option("--all", help="list all ways, and the reasons against the others")] = False,
    config: Config = None,
    store: Store = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the best method, optimizations, batch and GPU within a time and a budget; exit with 1 if there is none."""
    from ftbench.estimate.recommend import request as requests
    from ftbench.estimate.recommend import text

    request = requests.RecommendRequest(
        spec, sets or [], gpu, gpus, samples, deadline, max_cost, prices, goal, method, effective_batch, store,
        output, config,
    )  # fmt: skip
    answer = requests.answer(request)
    emit(text.as_json(answer) if as_json else text.as_text(answer, requests.command_of(request, answer), every), end="")
    if output is not None and answer.options:
        write_result(text.as_yaml(answer), output)
    raise typer.Exit(0 if answer.options else 1)
