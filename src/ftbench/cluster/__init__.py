"""Sweeps on Slurm and Ray, and runs on several nodes. The rest of ftbench works without this package."""

from pathlib import Path

from pydantic import Field, ValidationError

from ftbench.errors import SpecError
from ftbench.spec.base import Int, Part
from ftbench.spec.reading import in_file, read_yaml

SETTINGS = "slurm.yaml"


class SlurmSettings(Part):
    """The content of slurm.yaml: the resources of each cell. For missing keys, the cluster's defaults apply."""

    partition: str | None = Field(None, min_length=1, description="partition of the nodes")
    time: str | None = Field(None, coerce_numbers_to_str=True, description="time limit of a cell")
    gres: str | None = Field(None, min_length=1, description="generic resources of a cell, for example gpu:h200:1")
    preamble: str = Field("", description="shell commands before ftbench starts on a node")
    options: tuple[str, ...] = Field((), description="more options of sbatch, for example --account=physics")
    tasks: Int = Field(64, ge=1, le=1000, description="number of cells that are queued or running at the same time")
    python: str | None = Field(None, min_length=1, description="Python on the nodes; default: the path of this one")


def load_settings(on: str, source: Path) -> SlurmSettings:
    """Read the settings for `--on slurm` or `--on slurm:FILE`. Raise SpecError if the file is missing or invalid."""
    name = on.partition(":")[2]
    files = [Path(name)] if name else [source.parent / SETTINGS, Path(SETTINGS)]
    path = next((path for path in files if path.exists()), None)
    if path is None:
        raise SpecError(
            f"--on {on}: {' and '.join(map(str, dict.fromkeys(files)))} not found; docs/how-to/cluster.md shows one"
        )
    values = read_yaml(path, "a file for Slurm", "partition, time, gres or preamble (docs/how-to/cluster.md)")
    try:
        return SlurmSettings.model_validate(values)
    except ValidationError as error:
        raise SpecError(*in_file(error, path, SlurmSettings)) from None
