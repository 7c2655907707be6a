"""Commands before anything is trained: estimate, recommend, probe, doctor, list."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Config, Json, Out, Prices, Sets, Spec, Store, app, deliver
from ftbench.errors import MissingError, SpecError


@app.command()
def estimate(
    spec: Annotated[Path | None, typer.Argument(help="YAML file that says what to train and how")] = None,
    sets: Sets = None,
    gpu: Annotated[
        str | None, typer.Option(help="NAME,NAME of `ftbench list gpus`, or all; this machine's if left out")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GiB of a GPU that is in no table")] = None,
    gpus: Annotated[int, typer.Option(help="how many GPUs share the work")] = 1,
    strategy: Annotated[str | None, typer.Option(help="how they share it: ddp, fsdp, zero1, zero2 or zero3")] = None,
    config: Config = None,
    check: Annotated[
        bool, typer.Option("--check", help="exit code 0 fits, 1 uncertain, 2 does not (of GPUs the best)")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="run two steps of the real code on tensors without memory (needs torch)")
    ] = False,
    calibrate: Annotated[Path | None, typer.Option(help="learn from the runs in this folder", metavar="DIR")] = None,
    samples: Annotated[float | None, typer.Option(help="how many to train on, if not the spec's")] = None,
    hours: Annotated[float | None, typer.Option(help="how long a night is (8)")] = None,
    prices: Prices = None,
    store: Store = Path("results"),
    as_json: Json = False,
) -> None:
    """Say how much memory and time a spec needs, and whether it fits, without training."""
    from ftbench.estimate import command

    if calibrate is not None:
        if spec is not None:
            raise SpecError(f"estimate --calibrate learns from runs and estimates nothing: leave {spec} out")
        print(command.calibrate(calibrate))
        return
    if spec is None:
        raise SpecError("estimate: name a spec file, or learn from runs with --calibrate DIR")
    request = command.Request(spec, sets or [], gpu, memory_gb, gpus, strategy, config, samples, hours, prices, store)
    if simulate:
        from ftbench.estimate import simulation

        answer = simulation.answer(request)
    else:
        answer = command.estimate(request)
    print(answer.document if as_json else answer.text)
    raise typer.Exit(answer.code if check else 0)


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
    effective_batch: Annotated[int | None, typer.Option(help="samples a step, held by accumulation")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the best as a spec to run")] = None,
    config: Config = None,
    store: Store = Path("results"),
    as_json: Json = False,
) -> None:
    """Find the best method, optimizations, batch and GPU within a time and a budget; 1 if nothing is."""
    from ftbench.estimate.recommend import command
    from ftbench.estimate.recommend import text as view

    found = command.run(command.Request(
        spec, sets or [], gpu, samples, deadline, max_cost, prices, objective, method, effective_batch, store, output,
        config,
    ))  # fmt: skip
    print(json.dumps(view.as_json(found), ensure_ascii=False) if as_json else view.as_text(found), end="")
    if output is not None and found.options:
        deliver(view.as_yaml(found), output)
    raise typer.Exit(0 if found.options else 1)


@app.command()
def probe(out: Out = Path("results"), as_json: Json = False) -> None:
    """Measure this machine's ceilings, in a minute at most: products, memory, links, power."""
    from ftbench.probe import command

    print(f"probing this machine, {command.LIMIT_S:.0f} s at the most", file=sys.stderr)
    document, path = command.probe(out)
    print(json.dumps(document, ensure_ascii=False) if as_json else f"{command.table(document)}\nfile        {path}")


@app.command()
def doctor(
    spec: Annotated[Path | None, typer.Argument(help="a spec that is to run here")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Say what is installed, what works on this machine, and what to do about the rest."""
    from ftbench.doctor.examine import examine

    found = examine(spec, sets or [], out)
    print(json.dumps(found.as_dict(), ensure_ascii=False) if as_json else found.table())
    raise typer.Exit(MissingError.exit_code if found.can_run is False else 0)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, optimizations, recipes, models, datasets, gpus or keys")],
) -> None:
    """Show what can be named in a spec."""
    from ftbench.report.catalogue import catalogue

    print(catalogue(what), end="")
