"""`ftbench probe`, `doctor` and `list`: measure and check this machine, and list the names that a spec can use."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ftbench.cli.shared import Json, Out, Sets, Wide, command, emit, log
from ftbench.errors import MissingError, SpecError


@command()
def probe(out: Out = Path("results"), as_json: Json = False) -> None:
    """Measure this machine's peak rates in at most a minute: matrix products, memory, host link, kernel launches."""
    from ftbench.doctor import probe as probing

    log(f"probing this machine, {probing.LIMIT_S:.0f} s at most")
    document, path = probing.probe(out)
    emit(document if as_json else f"{probing.as_text(document)}\nfile        {path}")


@command()
def doctor(
    spec: Annotated[Path | None, typer.Argument(help="check whether this spec can run here")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Check this machine: which features work, which versions are installed, and how to fix problems."""
    from ftbench.doctor.diagnosis import examine

    if sets and spec is None:
        raise SpecError("--set: changes a spec; name the spec file too")
    diagnosis = examine(spec, sets or [], out)
    emit(diagnosis.as_dict() if as_json else diagnosis.as_text())
    raise typer.Exit(MissingError.exit_code if diagnosis.can_run is False else 0)


@command("list")
def list_(
    what: Annotated[
        Literal["methods", "objectives", "optimizations", "recipes", "models", "datasets", "gpus", "keys"],
        typer.Argument(
            metavar="LIST", help="methods, objectives, optimizations, recipes, models, datasets, gpus or keys"
        ),
    ],
    wide: Wide = False,
) -> None:
    """List the names that a spec can use: methods, models, GPUs …"""
    from ftbench.report.catalogue import catalogue

    emit(catalogue(what), end="")
