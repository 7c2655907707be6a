"""Who can run a spec's training loop: one protocol, one table by the name in `launch.framework`."""

from collections.abc import Mapping
from typing import Any, Protocol

from ftbench.launch import frameworks, mock, trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.store.rundir import RunDir


class Launcher(Protocol):
    """Turns a spec into the command that trains it; a module of this package."""

    def refusals(self, spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
        """Return why the spec cannot run beside a GPU of this compute capability (None: no GPU), a sentence each."""

    def check_installed(self, spec: Experiment) -> None:
        """Raise MissingError with the command to type unless what the spec needs is installed. Imports nothing."""

    def devices(self, spec: Experiment, visible: str | None) -> list[dict[str, Any]]:
        """Return the GPUs that the spec trains on, as machine.json lists them; `visible` is CUDA_VISIBLE_DEVICES."""

    def command(self, spec: Experiment, run: RunDir) -> list[str]:
        """Return the command that trains the spec in a run directory whose spec.json is written."""

    def environment(self, inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
        """Return the command's environment."""


LAUNCHERS: dict[str, Launcher] = {"trl": trl, "mock": mock, **dict.fromkeys(FRAMEWORKS, frameworks)}


def launcher_of(spec: Experiment) -> Launcher:
    """Return who runs the spec's training loop."""
    return LAUNCHERS[spec.launch.framework if spec.launch.mock == "off" else "mock"]


def command_of(spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that trains the spec."""
    return launcher_of(spec).command(spec, run)
