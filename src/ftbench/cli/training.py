"""Commands that train: run, profile, sweep, ablate."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftbench.cli.shared import Budget, DryRun, Force, Json, Out, Progress, Retry, Sets, Spec, app
from ftbench.errors import SpecError

if TYPE_CHECKING:
    from ftbench.launch.runner import Result
    from ftbench.sweep.command import Planned


@app.command()
def run(spec: Spec, sets: Sets = None, out: Out = Path("results"), as_json: Json = False) -> None:
    """Train once, record every step, print the card."""
    from ftbench.report.card import card

    result = trained(spec, sets or [], out)
    print(json.dumps(result.document(), ensure_ascii=False) if as_json else card(result.summary, result.run))
    raise typer.Exit(result.exit_code)


@app.command()
def profile(
    spec: Annotated[Path | None, typer.Argument(help="YAML file; its run is made for the profile alone")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    steps: Annotated[int | None, typer.Option(min=1, max=20, help="how many steps (measure.profile_steps)")] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="record with Nsight Systems instead")] = False,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option("--diff", help="two profiled runs: where their time differs")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record what a few steady steps do: kernels by group, idle gaps and their cause, memory by what it is for."""
    from ftbench.profile import command
    from ftbench.report.card import card

    if diff is not None:
        from ftbench.report.compare.profiles import compared

        print(compared(diff, spec, as_json))
        return
    result = trained(*command.request(spec, sets or [], steps, nsys), out)
    if as_json:
        print(json.dumps(result.document() | {"profile": command.document(result.run)}, ensure_ascii=False))
    else:
        print(command.shown(result.run) or card(result.summary, result.run))
    raise typer.Exit(result.exit_code)


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
    gpus: Annotated[str | None, typer.Option(help="use several GPUs of this machine at once", metavar="0,1")] = None,
    on: Annotated[str | None, typer.Option(help="a Ray cluster: ray, or ray://host:port", metavar="ray")] = None,
    dry_run: DryRun = False,
    status: Annotated[Path | None, typer.Option(help="where the sweep in this folder stands", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Run every cell of a grid, each in a process of its own; goes on where it stopped."""
    if status is not None:
        from ftbench.sweep.output import status as board

        found = board.status(status)
        print(json.dumps(found, ensure_ascii=False) if as_json else board.as_text(found))
        return
    if spec is None:
        raise SpecError("sweep: name a spec file, or ask for a running sweep with --status DIR")
    from ftbench.sweep import command

    short = {"method": method, "train.batch_size": batch_size}
    axes = [*(f"{key}={values}" for key, values in short.items() if values is not None), *(axis or [])]
    changes = [*(sets or []), *([f"measure.repeats={repeats}"] if repeats is not None else [])]
    chosen = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()] if gpus is not None else []
    if gpus is not None and not chosen:
        raise SpecError(f"--gpus {gpus}: name GPUs by number, for example --gpus 0,1")
    request = command.Request(
        spec, changes, axes, out, until_oom, trial_steps, effective_batch, time_budget, retry_failed, force,
        chosen, on,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        ready = command.prepare(request, stack)
        for note in ready.notes:
            print(f"ftbench: note: {note}", file=sys.stderr)
        if dry_run:
            planned(command.dry_run(ready), as_json)
            return
        code, tables = command.run(ready)
        if as_json:
            found = {"folder": str(ready.folder), "frontier": tables.frontier(), "runs": tables.records()}
            print(json.dumps(found, ensure_ascii=False))
        else:
            print(tables.terminal(), end="")
    raise typer.Exit(code)


@app.command()
def ablate(
    spec: Spec,
    sets: Sets = None,
    out: Out = Path("results"),
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each run: train.max_steps")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs of each rung, interleaved")] = 3,
    only: Annotated[str | None, typer.Option(help="these optimizations or rungs alone", metavar="A,B")] = None,
    objective: Annotated[str, typer.Option(help="what the best combination is best for: speed or memory")] = "speed",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best combination as a spec")] = None,
    time_budget: Budget = None,
    retry_failed: Retry = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run the plain recipe, then one optimization at a time, then what helped together: what each brings."""
    from ftbench.sweep import ablate as ladder
    from ftbench.sweep import command

    names = [name.strip() for name in only.split(",")] if only is not None else []
    request = ladder.Request(
        spec, sets or [], out, steps, repeats, names, objective, time_budget, retry_failed, force
    )  # fmt: skip
    if output is not None:
        ladder.check_output(request, output)
    ready = ladder.prepare(request)
    if dry_run:
        planned(command.dry_run(ready), as_json)
        return
    code, found = ladder.run(ready)
    print(json.dumps(found.document(), ensure_ascii=False) if as_json else found.terminal(), end="\n" * as_json)
    if output is not None:
        ladder.write_best(request, found, output)
    raise typer.Exit(code)


def planned(lines: list[Planned], as_json: bool) -> None:
    from ftbench.sweep.command import as_text

    print(json.dumps([dataclasses.asdict(line) for line in lines]) if as_json else as_text(lines))


def trained(spec: Path, sets: list[str], out: Path) -> Result:
    from ftbench.estimate import preflight
    from ftbench.launch import runner
    from ftbench.store.rundir import first_gpu

    live = Progress()
    result = runner.run(
        spec, sets, out, live.start, live.tick,
        lambda resolved, described: preflight.announce(
            resolved, first_gpu(described) or None, out, live.warn, live.expect
        ),
    )  # fmt: skip
    live.stop()
    return result
