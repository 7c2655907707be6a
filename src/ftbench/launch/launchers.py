"""Launchers: the table of everything that can train a spec, by `launch.framework`."""

from collections.abc import Mapping
from typing import Any, Protocol

from ftbench.launch import frameworks, mock, trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.store.rundir import RunDir


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
