"""The directory of a run: paths, JSON files and state.

The files are the interface between parent and worker, between machines, and between versions of ftbench. JSON files are
replaced atomically. Rows are only appended to steps.csv (see `steps.py`).
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ftbench.core import processes
from ftbench.errors import MissingError, SpecError
from ftbench.store import models

SCHEMA, MOST_JSON_BYTES, MOST_CSV_BYTES = 1, 64 * 2**20, 256 * 2**20
ARCHIVED = ".superseded"  # the folder of archived runs, which reports skip
NOT_FINITE = "not finite"  # the state of a run that finished with a loss or gradient that is NaN or infinite
STATES = ("running", "ok", "oom", "timeout", "error", "interrupted", NOT_FINITE)
# Signals that another process sends to end a run. A crash raises other signals.
CUT_SHORT = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WAITING = "wait_for_gpu"  # the phase of a worker that waits for the run of another process
# Files in profile/.
KERNELS, TRACE, WINDOW, SNAPSHOT = "kernels.json", "trace.json.gz", "window.json", "memory.pickle"
_RESERVE_BYTES = 64 * 1024  # freed when the disk is full, to leave space for the last state.json


class _File:
    """A file in a run directory. If a rank writes the file, its name contains the rank: `steps.rank1.csv`.

    With `ranks=True`, each rank writes such a file, and ftbench merges these files. With `ranks="first"`, the run uses
    the file of rank 0, which has no rank in its name.
    """

    def __init__(self, name: str, ranks: bool | str = False) -> None:
        self._name, self._ranks = name, ranks

    def __get__(self, run: RunDir, _: type | None = None) -> Path:
        stem, dot, suffix = self._name.partition(".")
        if run.rank is not None and (self._ranks is True or (self._ranks and run.rank)):
            return run.path / f"{stem}.rank{run.rank}{dot}{suffix}"
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of the files of a run. If `rank` is set, these are the files of this rank."""

    path: Path
    rank: int | None = None

    spec_yaml = _File("spec.yaml")
    spec_json = _File("spec.json")
    machine = _File("machine.json")
    applied = _File("applied.json", ranks="first")
    phases = _File("phases.json", ranks="first")
    steps = _File("steps.csv", ranks=True)
    state = _File("state.json", ranks=True)
    summary = _File("summary.json")
    framework = _File("framework.json")
    agreement = _File("agreement.json")
    log = _File("log.txt")
    gradients = _File("gradients.npz")
    weights = _File("weights.safetensors")
    adapter = _File("adapter")
    reserve = _File(".reserve")

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def profile(self) -> Path:
        return self.path / "profile" / f"rank{self.rank}" if self.rank else self.path / "profile"

    def of_rank(self, rank: int) -> RunDir:
        """Return the paths of the files of one rank."""
        return RunDir(self.path, rank)


def create(out: Path, experiment: str, slug: str) -> RunDir:
    """Create the run directory `out/experiment/slug-rN` with the lowest free number N and the state `running`."""
    parent = out / experiment
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
    for repeat in itertools.count(1):
        with suppress(FileExistsError):
            return create_at(parent / f"{slug}-r{repeat}")
    raise AssertionError


def create_at(path: Path) -> RunDir:
    """Create a run directory with the state `running`. Raise FileExistsError, or MissingError if the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        run = RunDir(path)
        run.reserve.write_bytes(b"\0" * _RESERVE_BYTES)
        write_json(run.state, running())
    except FileExistsError:
        raise
    except OSError as error:
        raise disk_error(path, error) from None
    return run


def archive(run: RunDir, destination: RunDir | None = None) -> RunDir:
    """Move a run into the folder `.superseded` next to this run (or next to `destination`). Return the moved run."""
    with writing(run.path):
        folder = (destination or run).path.parent / ARCHIVED
        folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in folder.glob(f"{run.run_id}.*"))
        while (target := folder / f"{run.run_id}.{number}").exists():
            number += 1
        run.path.rename(target)
    return RunDir(target)


def write_json(path: Path, data: Any, indent: int | None = 1) -> None:
    """Write a JSON document to `path`. The old file is replaced atomically (see `write_text`)."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=indent, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a temporary file to the disk, then rename it to `path` (atomic). Raise MissingError if writing fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            _write_through(temporary, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            RunDir(path.parent).reserve.unlink(missing_ok=True)
            _write_through(temporary, text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # a disk that cannot be written may not allow to delete either
            temporary.unlink()
        raise disk_error(path, error) from None


def _write_through(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # for file names that are not UTF-8
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def open_plain_file(path: Path, most: int) -> BufferedReader:
    """Open a file of up to `most` bytes. Raise ValueError for other files, and OSError if opening fails."""
    if path.exists() and not (path.is_file() and path.stat().st_size <= most):
        raise ValueError(f"not a regular file of at most {most >> 20} MiB")
    return path.open("rb")


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a JSON file. Raise ValueError for other kinds of files, and OSError if reading fails."""
    with open_plain_file(path, MOST_JSON_BYTES) as file:
        return file.read()


def read_document(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the object in a JSON file and None, or {} and an error message. For a missing file, return {} and None."""
    try:
        data = read_bytes(path)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise ValueError(f"not valid JSON ({error})") from None
        models.check(document, models.model_of(path))
        return dict(document), None
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, f"{path.name}: cannot be read ({error.strerror})"
    except ValueError as error:
        return {}, f"{path.name}: {error}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Return an empty object if the file is missing or invalid."""
    return read_document(path)[0]


def gpus_of(machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs in a machine.json. Older files have one GPU under the key `gpu`."""
    gpus = machine["gpus"] if "gpus" in machine else [machine.get("gpu")]
    return [gpu for gpu in gpus or [] if gpu]


def first_gpu(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first GPU in a machine.json, or an empty object."""
    return next(iter(gpus_of(machine)), {})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block, which writes to `path`, to a MissingError (see `disk_error`)."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None


def disk_error(path: Path, error: OSError) -> MissingError:
    """Convert the OSError of a failed write to a MissingError. The message gives a solution."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MissingError(f"{path}: no space left on the disk; free some, or write elsewhere")
    if error.errno == errno.ENOENT and not path.exists():
        return MissingError(f"{path}: the folder was deleted; run the same command again to create it")
    return MissingError(f"{path}: cannot be written ({error.strerror}); write elsewhere")


def running() -> dict[str, Any]:
    """Return the content of a state.json with the state `running` and this process as the owner."""
    owner = processes.this_process()
    return {"schema": SCHEMA, "state": "running", "started_at": now(), "owner": owner}


def read_state(run: RunDir) -> dict[str, Any]:
    """Return the state of a run (see `state_of`). If state.json is unreadable, the state is `error` with a reason."""
    state, problem = read_document(run.state)
    return state_of(state) if problem is None else {"state": "error", "reason": problem}


def state_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a state.json. If the process of a `running` run is dead, the state is `interrupted`."""
    if document.get("state") not in STATES:
        return {"state": "error", "reason": "state.json is missing or has an unknown state"}
    if document["state"] == "running" and not processes.alive(document.get("owner", {})):
        reason = "ftbench was killed or the machine went down during the run"
        return document | {"state": "interrupted", "reason": reason}
    return document


def now() -> str:
    """Return the current time in UTC, such as `2026-01-31T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def find_runs(path: Path) -> list[RunDir]:
    """Return the run directories (with a state.json) at or below `path`. Raise SpecError for unreadable folders."""
    runs: list[RunDir] = []
    seen = {str(parent) for parent in Path(os.path.realpath(path)).parents}  # a link to a parent is not followed

    def on_error(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise SpecError(f"{error.filename}: cannot be read: change its permissions, or name other folders")

    for folder, folders, files in os.walk(path, onerror=on_error, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        if "state.json" in (*files, *folders):
            runs.append(RunDir(Path(folder)))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "lost+found")  # of a disk
    return runs


def require_runs(path: Path, unpacked: Path | None = None) -> list[RunDir]:
    """Return the runs at or below `path`. If `path` is a bundle, `unpacked` is the folder with its files. Raise
    SpecError if there are no runs."""
    if not os.path.exists(path):  # also False for a name that is too long
        raise SpecError(f"{path}: no such file or folder; name the folder of `--out`, results by default")
    if not (runs := find_runs(unpacked or path)):
        raise SpecError(f"{path}: contains no run (a directory with a state.json); `ftbench run` creates one")
    return runs
