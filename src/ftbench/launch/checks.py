"""Launchers (everything that can train a spec), and checks before a run starts: machine, packages, files, disk."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ftbench.errors import MissingError, SpecError
from ftbench.launch import frameworks, mock, trl
from ftbench.launch.ranks import too_many
from ftbench.spec.datasets import check_file
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.objectives import reward_problem
from ftbench.store.rundir import RunDir, first_gpu

MINIMUM_FREE_BYTES = 32 * 2**20


class Launcher(Protocol):
    """A module of this package that turns a spec into the command that trains it."""

    def refusals(self, spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
        """Return why the spec cannot run on a GPU of this compute capability (None: no GPU)."""

    def check_installed(self, spec: Experiment) -> None:
        """Raise MissingError with the command to type if a package is missing. Import nothing."""

    def devices(self, spec: Experiment, visible: str | None) -> list[dict[str, Any]]:
        """Return the GPUs that the spec uses, as in machine.json. `visible` is CUDA_VISIBLE_DEVICES."""

    def command(self, spec: Experiment, run: RunDir) -> list[str]:
        """Return the command that trains in a run directory with a spec.json."""

    def environment(self, inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
        """Return the environment of the command."""


LAUNCHERS: dict[str, Launcher] = {"trl": trl, "mock": mock, **dict.fromkeys(FRAMEWORKS, frameworks)}


def launcher_of(spec: Experiment) -> Launcher:
    """Return the launcher of a spec."""
    return LAUNCHERS[spec.launch.framework if spec.launch.mock == "off" else "mock"]


def command_of(spec: Experiment, run: RunDir) -> list[str]:
    return launcher_of(spec).command(spec, run)


def check(spec: Experiment, described: dict[str, Any]) -> None:
    """Check that a resolved spec can run on this machine.

    Raises:
        SpecError: A file is missing.
        MissingError: The machine or the installed packages are not sufficient.
    """
    sentences = problems(spec, described)
    if sentences and not _file_problems(spec):
        raise MissingError("\n".join(sentences))
    check_needed(spec, sentences)


def problems(spec: Experiment, described: dict[str, Any]) -> list[str]:
    """Return the reasons why a resolved spec cannot run on this machine. `load` has reported the static ones."""
    others = launcher_of(spec).refusals(spec, capability(described)) + too_many(spec, described)
    return incompatibilities(spec) + others


def capability(described: dict[str, Any]) -> tuple[int, int] | None:
    """Return the compute capability of the GPU in a machine.json; None without a GPU."""
    numbers = first_gpu(described).get("compute_capability")
    return (int(numbers[0]), int(numbers[1])) if numbers else None


def check_needed(spec: Experiment, others: Sequence[str] = ()) -> None:
    """Raise SpecError for missing files (plus `others`), DataError for invalid data, MissingError for packages."""
    if wrong := _file_problems(spec):
        raise SpecError(*wrong, *others)
    check_file(spec.dataset, spec.objective.pairs)
    launcher_of(spec).check_installed(spec)


def _file_problems(spec: Experiment) -> list[str]:
    wrong = []
    path = Path(spec.dataset.path or ".")
    if not path.is_file() and not path.is_dir():  # such as a pipe
        wrong.append(f"dataset.path: {spec.dataset.path}: no such file or folder")
    if spec.model.path and spec.model.weights == "pretrained":
        problem = checkpoint_problem(Path(spec.model.path))
        wrong += [f"model.path: {problem}"] if problem else []
    if spec.model.path and spec.model.weights == "random":
        file = Path(spec.model.path)
        if not (file / "config.json" if file.is_dir() else file).is_file():
            wrong.append(f"model.path: {spec.model.path}: no such config.json")
    sentences = map(reward_problem, getattr(spec.objective, "reward", None) or ())
    return wrong + [f"objective.reward: {sentence}" for sentence in sentences if sentence]


def check_disk(out: Path) -> None:
    """Raise MissingError if `out` cannot be written or its disk is full."""
    path = Path(os.path.realpath(out))
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise MissingError(f"{existing}: cannot be written; choose another place with --out")
    if (free := shutil.disk_usage(existing).free) < MINIMUM_FREE_BYTES:
        raise MissingError(f"{existing}: only {free / 2**20:.0f} MiB free; free some, or write elsewhere with --out")


def checkpoint_problem(folder: Path) -> str | None:
    """Return why a model directory cannot be loaded, or None. Only the names of its files are checked."""
    if not folder.is_dir():
        return f"{folder}: no such directory"
    if not (folder / "config.json").is_file():
        return f"{folder}: not a model directory: config.json is missing"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: config.json exists but no weights (*.safetensors); copy them there, or set "
            "model.weights=random to measure the same shape without weights"
        )
    return None
