"""slurm.yaml: the resources of each cell of a sweep on a Slurm cluster."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from ftbench.errors import SpecError
from ftbench.spec.base import Int, Part
from ftbench.spec.reading import in_file, read_yaml

NAME = "slurm.yaml"
# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, and days before each.
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED")
# sbatch options that ftbench sets itself, with the key of slurm.yaml that sets them.
_OWN = {"partition": "partition", "time": "time", "gres": "gres", "array": "tasks", "job-name": "", "output": "",
        "error": "", "open-mode": "", "requeue": "", "no-requeue": "", "parsable": "", "wrap": "", "wait": "",
        "signal": ""}  # fmt: skip


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class SlurmSettings(Part):
    """The resources of each cell. Missing keys keep the cluster's default."""

    partition: str | None = Field(None, min_length=1, description="partition of the nodes")
    time: Annotated[str | None, BeforeValidator(_text)] = Field(None, description="time limit of a cell")
    gres: str | None = Field(None, min_length=1, description="generic resources of a cell, for example gpu:h200:1")
    preamble: str = Field("", description="shell commands before ftbench starts on a node")
    options: tuple[str, ...] = Field((), description="more options of sbatch, for example --account=physics")
    tasks: Int = Field(64, ge=1, le=1000, description="number of cells that are queued or running at the same time")
    python: str | None = Field(None, min_length=1, description="Python on the nodes; default: the path of this one")

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.fullmatch(value):
            raise ValueError('is not a time limit: write minutes, "hours:minutes:seconds" or "days-hours"')
        return value

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            name = option.removeprefix("--").partition("=")[0]
            if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
                raise ValueError(f"{option!r} is not a long option of sbatch, for example --mem=64G")
            # sbatch accepts prefixes: --arra is --array
            if own := name if name in _OWN else next((each for each in _OWN if each.startswith(name)), None):
                raise ValueError(f"--{own} is set by ftbench" + (f": use `{_OWN[own]}`" if _OWN[own] else ""))
        return value


def load_settings(path: Path) -> SlurmSettings:
    """Return the settings in a file. Raise SpecError with `file:line: key: problem` for each mistake."""
    values = read_yaml(path, "a file for Slurm", "partition, time, gres or preamble (docs/how-to/cluster.md)")
    try:
        return SlurmSettings.model_validate(values)
    except ValidationError as error:
        raise SpecError(*in_file(error, path, SlurmSettings)) from None
