"""`ftbench probe`, `ftbench doctor`, `ftbench env` and `ftbench list`: what this machine can do, and what a spec can
name."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ftbench.cli.shared import Json, Out, Sets, Wide, app, emit, tell
from ftbench.errors import MissingError, SpecError


@app.command()
def probe(out: Out = Path("results"), as_json: Json = False) -> None:
    """Measure this machine's ceilings, in a minute at most. Products, memory, links, power."""
    from ftbench.probe import command
    from ftbench.probe.text import as_text

    tell(f"probing this machine, {command.LIMIT_S:.0f} s at the most")
    document, path = command.probe(out)
    emit(document if as_json else f"{as_text(document)}\nfile        {path}")


@app.command()
def doctor(
    spec: Annotated[Path | None, typer.Argument(help="a spec that is to run here")] = None,
    sets: Sets = None,
    python: Annotated[str | None, typer.Option(help="look at the environment of another framework instead")] = None,
    out: Out = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Say what works on this machine, and what to do where not. Also what is installed, and in which version."""
    from ftbench.doctor.examine import examine, examine_environment

    if python is not None and (spec or sets):
        raise SpecError("--python: a spec's own launch.python is looked at with it: leave one of the two out")
    if sets and spec is None:
        raise SpecError("--set: changes a spec: name its file, or leave the change out")
    diagnosis = examine(spec, sets or [], out) if python is None else examine_environment(python)
    emit(diagnosis.as_dict() if as_json else diagnosis.as_text())
    raise typer.Exit(MissingError.exit_code if diagnosis.can_run is False else 0)


@app.command()
def env(
    action: Annotated[Literal["create"], typer.Argument(help="create: make one", metavar="create")],
    framework: Annotated[str, typer.Argument(help="axolotl, llamafactory or ms-swift")],
    path: Annotated[Path | None, typer.Argument(help="a new folder; environments/FRAMEWORK if left out")] = None,
) -> None:
    """Make an environment of another framework. With the versions that were tried, for `launch.python`."""
    from ftbench.launch.environments import create

    emit(str(create(framework, path, tell)))


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(metavar="methods|objectives|optimizations|recipes|models|datasets|gpus|keys", help="which list"),
    ],
    wide: Wide = False,
) -> None:
    """Show what can be named in a spec: methods, models, GPUs …"""
    from ftbench.report.catalogue import catalogue

    emit(catalogue(what), end="")
