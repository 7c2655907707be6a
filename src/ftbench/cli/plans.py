"""`ftbench sweep`, `ftbench ablate` and `ftbench parity`: many runs of a plan, which go on where they stopped."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import PlanOptions, Spec, emit, plan_command, run_plan, tell, uncollected
from ftbench.errors import SpecError


@plan_command
def sweep(
    spec: Annotated[Path | None, typer.Argument(help="YAML file, with its `sweep:` section or with axes below")] = None,
    axis: Annotated[list[str] | None, typer.Option(help="a key and its values", metavar="KEY=V,V")] = None,
    batch_size: Annotated[str | None, typer.Option(help="the axis train.batch_size", metavar="1,2,4")] = None,
    method: Annotated[str | None, typer.Option(help="the axis method", metavar="lora,qlora")] = None,
    repeats: Annotated[int | None, typer.Option(help="runs of each cell, interleaved: measure.repeats")] = None,
    until_oom: Annotated[bool, typer.Option("--until-oom", help="find the largest batch that fits")] = False,
    trial_steps: Annotated[
        int | None, typer.Option(min=3, max=1000, help="--until-oom: optimizer steps of each trial (7)")
    ] = None,
    effective_batch: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="--until-oom: samples a step, held by accumulation")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="several single-GPU runs at once, one on each of these", metavar="0,1")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="a cluster: slurm (with slurm.yaml), ray, or ray://host:port", metavar="slurm")
    ] = None,
    status: Annotated[Path | None, typer.Option(help="where the sweep in this folder stands", metavar="DIR")] = None,
    *,
    options: PlanOptions,
) -> None:
    """Run every cell of a grid, each in a process of its own. It goes on where it stopped."""
    if status is not None:
        if spec is not None:
            raise SpecError(f"sweep: --status shows a sweep and runs nothing: leave {spec} out")
        from ftbench.sweep.output import status as view

        board = view.status(status)
        emit(board if options.as_json else view.as_text(board))
        return
    if spec is None:
        raise SpecError("sweep: name a spec file, or ask for a running sweep with --status DIR")
    from ftbench.sweep import command

    shared = options.request()
    shared["sets"] += [f"measure.repeats={repeats}"] if repeats is not None else []
    request = command.SweepRequest(
        spec, axes=_axes({"method": method, "train.batch_size": batch_size}, axis or []), until_oom=until_oom,
        trial_steps=trial_steps, effective_batch=effective_batch, gpus=_gpus(gpus), on=on, **shared,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        with uncollected():
            ready = command.prepare(request, stack, lambda text: tell(f"ftbench: note: {text}"))
        code, _ = run_plan(ready, options)
    raise typer.Exit(code)


def _axes(options: dict[str, str | None], axes: list[str]) -> list[str]:
    """Return the axes of the command line, those with an option of their own first. Raise SpecError for a key that is
    named twice: one of the two would be dropped."""
    every = [*(f"{key}={values}" for key, values in options.items() if values is not None), *axes]
    keys = [text.partition("=")[0].strip() for text in every]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise SpecError(f"--axis {twice[0]}: stands on the command line twice; give all its values at once")
    return every


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text is not None else []


def _gpus(text: str | None) -> list[str]:
    gpus = [gpu for gpu in _names(text) if gpu]
    if text is not None and not gpus:
        raise SpecError(f"--gpus {text}: name GPUs by number, for example --gpus 0,1")
    return gpus


@plan_command
def ablate(
    spec: Spec,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each run: train.max_steps")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs of each variant, interleaved")] = 3,
    only: Annotated[str | None, typer.Option(help="these optimizations or variants alone", metavar="A,B")] = None,
    objective: Annotated[str, typer.Option(help="what the best combination is best for: speed or memory")] = "speed",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best combination as a spec")] = None,
    *,
    options: PlanOptions,
) -> None:
    """Measure what each optimization brings, alone and together. Plain runs first, then each, then what helped."""
    from ftbench.sweep import ablate as command

    request = command.AblationRequest(
        spec, steps=steps, repeats=repeats, only=_names(only), objective=objective, **options.request()
    )
    if output is not None:
        command.check_output(request, output)
    code, tables = run_plan(command.prepare(request), options)
    if output is not None:
        command.write_best(request, tables, output)
    raise typer.Exit(code)


@plan_command
def parity(
    spec: Spec,
    against: Annotated[str, typer.Option(help="the reference: a recipe, or a file with one")] = "plain",
    recipe: Annotated[
        str | None, typer.Option(help="recipes to judge; the spec as it is if empty", metavar="A,B")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="seeds of each recipe")] = 3,
    steps: Annotated[int | None, typer.Option(min=6, help="optimizer steps of each run: train.max_steps")] = None,
    gradients: Annotated[int, typer.Option(min=0, max=20, help="first steps whose gradients are compared")] = 3,
    parallel: Annotated[int, typer.Option(min=1, max=8, help="runs side by side on the GPU: speed is nobody's")] = 1,
    *,
    options: PlanOptions,
) -> None:
    """Say whether recipes learn the same, over several seeds. A reference trains beside them, and controls that must
    fail."""
    from ftbench.sweep import parity as command

    request = command.ParityRequest(
        spec=spec, against=against, recipes=_names(recipe), seeds=seeds, steps=steps, gradients=gradients,
        parallel=parallel, **options.request(),
    )  # fmt: skip
    code, _ = run_plan(command.prepare(request), options)
    raise typer.Exit(code)
