"""Runs of other frameworks: the worker prepares the run and then starts the framework's interpreter."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ftbench.core.processes import run_program
from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS, Framework, interpreter, needs
from ftbench.spec.optimizations import Optimizations
from ftbench.store import machine

devices, command = trl.devices, trl.command
_LIMIT_S, _IMPORT_LIMIT_S = 30, 300  # an import from a cold disk takes minutes
_FAILED = "?"  # answer of an interpreter that cannot be started or does not end
_VERSION = re.compile(r"[\w.+!-]{1,40}")
_PRINT_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
# Telemetry and version checks of these frameworks are off.
_SWITCHES = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "DISABLE_VERSION_CHECK": "1", "USE_HF": "1"}
_PRINT_CONTENTS = """
import importlib, importlib.metadata as m, json, sys
found = {"versions": {}, "torch": None, "problem": None}
for name in sys.argv[2:]:
    try:
        found["versions"][name] = m.version(name)
    except m.PackageNotFoundError:
        pass
try:
    import torch
    found["torch"] = {"version": torch.__version__, "works": torch.cuda.is_available()}
    importlib.import_module(sys.argv[1])
except BaseException as error:
    found["problem"] = f"{type(error).__name__}: {error}"[:300]
print()
print(json.dumps(found))
"""


def refusals(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return why the spec cannot run on a GPU of this compute capability (None: no GPU)."""
    sentences = trl.refusals(spec, capability)
    if spec.launch.settings == "best" and capability is None:
        sentences.append("launch.settings best: its kernels need a GPU, and this machine has none: use plain")
    return sentences


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the child's environment: that of our own worker, without the frameworks' telemetry."""
    return trl.environment(inherited, spec) | _SWITCHES


def check_installed(spec: Experiment) -> None:
    """Raise MissingError with the command to type if a package is missing in either interpreter.

    Our own interpreter prepares the run. The framework's one must have the tested version of the framework.
    """
    trl.check_installed(spec.model_copy(update={"optimizations": Optimizations()}))  # the framework applies them
    wanted, python = FRAMEWORKS[spec.launch.framework], interpreter(spec.launch)
    if not is_interpreter(python):
        raise MissingError(f"launch.python: {spec.launch.python}: no such interpreter; {wanted.way}")
    version = _version(python, wanted.package)
    if not version:
        raise MissingError(f"launch.python: {spec.launch.python} does not have {wanted.package}; {wanted.way}")
    if not _VERSION.fullmatch(version):
        raise MissingError(
            f"launch.python: {spec.launch.python} does not answer like Python within {_LIMIT_S} s; {wanted.way}"
        )
    if version != wanted.version and not spec.measure.allow_fallback:
        raise MissingError(
            f"launch.python: {spec.launch.python} has {wanted.package} {version}, but {wanted.version} was tested: "
            f"{wanted.way}; measure.allow_fallback=on runs it anyway"
        )
    for package, why in needs(spec, machine.gpu() is not None).items():
        if not _version(python, package):
            tested = f"=={wanted.versions[package]}" if package in wanted.versions else ""
            raise MissingError(
                f"launch.python: {spec.launch.python} does not have {package}, which {why} needs: {spec.launch.python} "
                f"-m pip install '{package}{tested}'" + (f", or leave {why} out" if "." in why else "")
            )


def is_interpreter(python: str) -> bool:
    return Path(python).is_file() and os.access(python, os.X_OK)


def framework_of(python: str) -> str | None:
    """Return the framework that is installed for an interpreter, or None."""
    for name, each in FRAMEWORKS.items():
        if (version := _version(python, each.package)) == _FAILED:
            return None
        if _VERSION.fullmatch(version):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Contents:
    """Packages of an environment with their versions, its torch, and why the trainer cannot be imported, if so."""

    versions: dict[str, str]
    torch: dict[str, Any] | None
    problem: str | None


def contents(python: str, framework: Framework) -> Contents:
    """Return the tested packages that an environment has. This imports the framework's trainer."""
    answer = _answer([python, "-c", _PRINT_CONTENTS, framework.entry, *framework.versions], _IMPORT_LIMIT_S)
    try:
        return TypeAdapter(Contents).validate_python(json.loads(answer.splitlines()[-1]))
    except (ValueError, IndexError, ValidationError):
        return Contents({}, None, f"{python} does not answer like Python within {_IMPORT_LIMIT_S} s")


@lru_cache(maxsize=16)
def _version(python: str, package: str) -> str:
    """Return the version of a package in an interpreter's environment; empty if it is not installed."""
    return _answer([python, "-c", _PRINT_VERSION, package], _LIMIT_S)


def _answer(command: list[str], limit_s: float) -> str:
    """Return the output of an interpreter, or `_FAILED`."""
    try:
        return run_program(command, limit_s, {**os.environ, **_SWITCHES}).stdout.strip()
    except OSError:
        return _FAILED
