"""The command of another framework's run: ftbench's own worker prepares it and hands it to the framework's
interpreter."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS, interpreter

devices, command = trl.devices, trl.command
_LIMIT_S = 4  # a cold disk takes seconds to answer; nobody waits for more than five
_LONGEST, _SILENT = 64, "?"  # bytes of a version; the answer of what gives none
_VERSION = re.compile(r"[\w.+!-]{1,40}")
_ASK = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def refusals(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return what no library can do beside a GPU of this compute capability (None: no GPU)."""
    return trl.refusals(spec, capability)


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the child's environment: as our own worker's, with what these frameworks would do unasked switched off."""
    switches = {
        "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "DISABLE_VERSION_CHECK": "1", "USE_HF": "1",
    }  # fmt: skip
    return trl.environment(inherited, spec) | switches


def check_installed(spec: Experiment) -> None:
    """Raise MissingError with what to type unless our own interpreter can prepare the run and the framework's has it,
    in the version that was tried."""
    trl.check_installed(spec)
    wanted, python = FRAMEWORKS[spec.launch.framework], interpreter(spec.launch)
    way = wanted.way
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        raise MissingError(f"launch.python: {spec.launch.python}: no such interpreter; {way}")
    version = _version(python, wanted.package)
    if not version:
        raise MissingError(f"launch.python: {spec.launch.python} does not have {wanted.package}; {way}")
    if not _VERSION.fullmatch(version):
        raise MissingError(
            f"launch.python: {spec.launch.python}: does not answer as Python does within {_LIMIT_S} s; {way}"
        )
    if version != wanted.version and not spec.measure.allow_fallback:
        raise MissingError(
            f"launch.python: {spec.launch.python} has {wanted.package} {version}, and {wanted.version} is what was "
            f"tried: {way}; measure.allow_fallback=on runs it all the same"
        )


@lru_cache(maxsize=16)
def _version(python: str, package: str) -> str:
    """Return what an interpreter says is the version of a package in its environment: nothing where that is not there,
    no version where it is no interpreter, or says nothing for so long."""
    try:
        child = subprocess.Popen(
            [python, "-c", _ASK, package], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        return _SILENT
    with child:
        assert child.stdout is not None
        answer = _first_bytes(child.stdout.fileno(), time.monotonic() + _LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return answer


def _first_bytes(pipe: int, until: float) -> str:
    """Return what comes out of a pipe until it ends, or as much as shows that it is no version."""
    answer = b""
    while len(answer) <= _LONGEST:
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            return _SILENT
        if not (part := os.read(pipe, _LONGEST + 1)):
            break
        answer += part
    return answer.decode(errors="replace").strip()
