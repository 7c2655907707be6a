"""`ftbench estimate`, `data`, `recommend` and `init`: predict time and memory before a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ftbench.cli.shared import (
    ADVANCED,
    CLUSTER,
    INPUT,
    LIMITS,
    Data,
    Json,
    Length,
    Output,
    Overwrite,
    Prices,
    Recipe,
    Sets,
    Spec,
    Store,
    Wide,
    check_output,
    command,
    duration,
    emit,
    gpu_count,
    of,
    write_result,
)
from ftbench.errors import SpecError

if TYPE_CHECKING:
    from ftbench.estimate.recommend.request import RecommendRequest

GpuNames = Annotated[list[str] | None, typer.Option("--gpu", help="4090, or 4090,L40S, or all (default: this machine)")]


def _joined(names: list[str] | None) -> str | None:
    return ",".join(names) if names else None


@command()
def estimate(
    spec: Spec,
    gpu: GpuNames = None,
    dataset: Data = None,
    length: Length = None,
    recipe: Recipe = None,
    sets: Sets = None,
    samples: Annotated[int | None, of(INPUT, "samples to train on (default: the spec's)", min=1, max=10**15)] = None,
    hours: Annotated[float | None, of(INPUT, "length of a night in hours (default: 8)", min=0.001, max=10**6)] = None,
    gpus: Annotated[int | None, of(CLUSTER, "number of GPUs (default: spec)", parser=gpu_count, metavar="N")] = None,
    strategy: Annotated[
        str | None,
        of(CLUSTER, "how GPUs share the work: ddp, fsdp, zero1 to zero3, tp, ep, cp, pp, pp+fsdp, ...; or all"),
    ] = None,
    check: Annotated[bool, of(ADVANCED, "set the exit code: 0 fits, 1 may fit, 2 does not fit", "--check")] = False,
    prices: Prices = None,
    store: Store = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Estimate the memory and time of a training, and whether it fits. Nothing is trained."""
    from ftbench.estimate import estimates
    from ftbench.spec.model_argument import spec_sets

    answer = estimates.estimate(estimates.EstimateRequest(
        spec, spec_sets(sets, recipe, dataset, length, samples), _joined(gpu), gpus, strategy, samples, hours, prices,
        store or Path("results"),
    ))  # fmt: skip
    emit(answer.document if as_json else answer.text)
    raise typer.Exit(answer.code if check else 0)


@command()
def data(spec: Spec, dataset: Data = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show a data set: lengths, truncation, padding, packing gain, three samples."""
    from ftbench.estimate import preview
    from ftbench.spec.model_argument import spec_sets

    document = preview.preview(spec, spec_sets(sets, None, dataset, None))
    emit(document if as_json else preview.as_text(document))


@command()
def recommend(
    spec: Spec,
    gpu: GpuNames = None,
    samples: Annotated[
        int | None, typer.Option(help="samples to train on (default: the spec's)", min=1, max=10**15)
    ] = None,
    dataset: Data = None,
    length: Length = None,
    sets: Sets = None,
    deadline: Annotated[Any, of(LIMITS, "time limit", metavar="8h", parser=duration)] = None,
    max_cost: Annotated[float | None, of(LIMITS, "cost limit, in the currency of --prices", min=0.001)] = None,
    goal: Annotated[
        Literal["speed", "cost", "energy", "memory"], of(LIMITS, "rank by speed, cost, energy or memory")
    ] = "speed",
    method: Annotated[str | None, of(LIMITS, "methods to compare, such as lora,full")] = None,
    effective_batch: Annotated[str | None, of(LIMITS, "samples per step, or any (default: the spec, or 16)")] = None,
    gpus: Annotated[int | None, of(CLUSTER, "largest GPU count (default: spec)", parser=gpu_count, metavar="N")] = None,
    output: Output = None,
    force: Overwrite = False,
    every: Annotated[bool, of(ADVANCED, "list all variants, and the reasons for rejected variants", "--all")] = False,
    prices: Prices = None,
    store: Store = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the best method, recipe, batch size and GPU within a deadline and a budget. Exits with 1 if nothing fits."""
    from ftbench.estimate.recommend.request import RecommendRequest
    from ftbench.spec.model_argument import spec_sets

    request = RecommendRequest(
        spec, spec_sets(sets, None, dataset, length, samples), _joined(gpu), gpus, samples, deadline, max_cost, prices,
        goal, method, effective_batch, store or Path("results"), output,
    )  # fmt: skip
    _recommend(request, force, as_json, every)


def _recommend(request: RecommendRequest, force: bool, as_json: bool = False, every: bool = False) -> None:
    from ftbench.estimate.recommend import request as requests
    from ftbench.estimate.recommend import text

    answer = requests.answer(request)
    if answer.options:
        check_output(request.output, force)
    emit(text.as_json(answer) if as_json else text.as_text(answer, requests.command_of(request, answer), every), end="")
    if request.output is not None and answer.options:
        write_result(text.as_yaml(answer), request.output)
    raise typer.Exit(0 if answer.options else 1)


@command()
def init(
    model: Annotated[Path | None, typer.Argument(help="the model: Qwen/Qwen3-8B, or a local folder")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="file of samples, data set, or mean tokens per sample", metavar="FILE")
    ] = None,
    gpu: GpuNames = None,
    samples: Annotated[int | None, typer.Option(help="number of samples to train on", min=1, max=10**15)] = None,
    output: Output = Path("run.yaml"),
    force: Overwrite = False,
) -> None:
    """Write a commented spec with the best recipe and batch size. Ask for values that are not given as options."""
    from ftbench.estimate.gpus import gpus_named
    from ftbench.estimate.recommend.request import RecommendRequest
    from ftbench.spec.load import load
    from ftbench.spec.model_argument import spec_sets
    from ftbench.store import machine

    check_output(output, force)
    model = Path(model or _ask("MODEL", "Which model? owner/name, or a folder", "Qwen/Qwen3-8B"))
    dataset = dataset or _ask("--dataset", "Which data? A file, a data set, or mean tokens of a sample", "sample")
    name, length = (None, int(dataset)) if dataset.removeprefix("-").isdecimal() else (dataset, None)
    load(model, spec_sets(None, None, name, length))  # a wrong answer ends the command before the next question
    own = (machine.gpu() or {}).get("name", "RTX 4090")
    names = _joined(gpu) or _ask("--gpu", "Which GPU? `ftbench list gpus` lists them", own)
    gpus_named(names)
    samples = _ask("--samples", "How many samples will it train on?", 1000) if samples is None else samples
    if samples < 1:
        raise SpecError(f"--samples {samples}: must be at least 1, the number of samples to train on")
    sets = spec_sets(None, None, name, length, samples)
    _recommend(RecommendRequest(model, sets, names, samples=samples, output=output), force=True)


def _ask(option: str, question: str, default: str | int) -> Any:
    """Ask a question on the terminal. Return the answer, which has the type of `default`.

    Raise SpecError if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SpecError(
            f"init: needs {option} without a terminal, for example `ftbench init Qwen/Qwen3-8B --dataset data.jsonl "
            "--gpu 4090 --samples 20000`"
        )
    return typer.prompt(question, default=default, err=True)
