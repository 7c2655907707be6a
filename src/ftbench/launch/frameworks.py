"""The launcher for frameworks other than trl. The worker prepares the run, then starts the framework's interpreter."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ftbench.core.processes import run_program
from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS, interpreter, needs
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.optimizations import Optimizations
from ftbench.store import machine

devices, command = trl.devices, trl.command
_LIMIT_S = 30
_PRINT_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
# Switch off telemetry and version checks of the frameworks.
_SWITCHES = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "DISABLE_VERSION_CHECK": "1", "USE_HF": "1"}


def problems(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return error messages for settings that do not work on a GPU of this compute capability (None: no GPU)."""
    sentences = machine_incompatibilities(spec, capability)
    if spec.launch.settings == "best" and capability is None:
        sentences.append("launch.settings best: its kernels need a GPU, and this machine has none: use plain")
    if spec.launch.framework == "verl" and capability is None:
        sentences.append(
            "launch.framework verl: verl registers its trainer for CUDA only, and this machine has no GPU: use a GPU "
            "machine, or another framework"
        )
    return sentences


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the environment variables for the worker. Switch off the telemetry of the frameworks."""
    return trl.environment(inherited, spec) | _SWITCHES


def check_installed(spec: Experiment) -> None:
    """Raise MissingError with the install command if a package is missing.

    Check the interpreter of ftbench, which prepares the run. Check the interpreter of the framework for the tested
    version.
    """
    trl.check_installed(spec.model_copy(update={"optimizations": Optimizations()}))  # applied by the framework
    wanted, python = FRAMEWORKS[spec.launch.framework], interpreter(spec.launch)
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        raise MissingError(f"launch.python: {spec.launch.python}: no such interpreter; {wanted.install_hint}")
    version = _version(python, wanted.package)
    if not version:
        raise MissingError(f"launch.python: {spec.launch.python} does not have {wanted.package}; {wanted.install_hint}")
    if version != wanted.version and not spec.measure.allow_fallback:
        raise MissingError(
            f"launch.python: {spec.launch.python} has {wanted.package} {version:.40}, but {wanted.version} was tested: "
            f"{wanted.install_hint}; measure.allow_fallback=on runs it anyway"
        )
    for package, why in needs(spec, machine.gpu() is not None).items():
        if not _version(python, package):
            tested = f"=={wanted.versions[package]}" if package in wanted.versions else ""
            raise MissingError(
                f"launch.python: {spec.launch.python} does not have {package}, which {why} needs: {spec.launch.python} "
                f"-m pip install '{package}{tested}'" + (f", or leave {why} out" if "." in why else "")
            )


@lru_cache(maxsize=16)
def _version(python: str, package: str) -> str:
    """Return the version of a package that an interpreter can import. Return an empty string if the package is missing,
    or if the interpreter does not work."""
    command = [python, "-c", _PRINT_VERSION, package]
    try:
        return run_program(command, _LIMIT_S, {**os.environ, **_SWITCHES}).stdout.strip()
    except OSError:
        return ""
