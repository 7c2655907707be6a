"""A run's directory: every path in it, atomic JSON, and its state.

These files are the whole interface between parent and child, between machines and between versions. Standard library
only. A JSON file is replaced whole or not at all; steps.csv (`steps.py`) only ever grows by whole lines.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError, SpecError
from ftbench.store import process_identity, shapes

SCHEMA = 1
MOST_JSON_BYTES, MOST_CSV_BYTES = 64 * 2**20, 256 * 2**20
ARCHIVED = ".superseded"
NOT_FINITE = "not finite"  # the state of a run that came to its end with a loss or gradient that is no number
STATES = ("running", "ok", "oom", "timeout", "error", "interrupted", NOT_FINITE)
# Signals by which somebody else ends a process; a process that crashes gets others.
CUT_SHORT = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WAITING = "wait_for_gpu"  # the phase in which a worker waits until another run's is done
# What a worker leaves in profile/ for whoever reads it, and what is made of that.
KERNELS, TRACE, WINDOW, MEMORY, OOM_MEMORY = "kernels.json", "trace.json", "window.json", "memory.json", "oom.json"
_RESERVE_BYTES = 64 * 1024  # set aside so that a full disk still takes the last state


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run, or of one of its ranks or nodes: what each of them writes has its number in the name."""

    path: Path
    rank: int | None = None
    node: int = 0

    @property
    def run_id(self) -> str:
        return self.path.name

    def of_rank(self, rank: int) -> RunDir:
        """Return the paths of one rank of several."""
        return RunDir(self.path, rank)

    def __getattr__(self, name: str) -> Path:
        if name not in _FILES:
            raise AttributeError(name)
        of_rank = self.rank is not None and (name in _MADE_OF_RANKS or (self.rank and name in _OF_EACH_RANK))
        if of_rank or (self.node and name in _OF_EACH_NODE):
            stem, _, ending = _FILES[name].partition(".")
            return self.path / f"{stem}.{f'rank{self.rank}' if of_rank else f'node{self.node}'}.{ending}"
        if self.rank and name == "profile":
            return self.path / _FILES[name] / f"rank{self.rank}"
        return self.path / _FILES[name]


_JSON = ("machine", "applied", "phases", "summary", "state", "samples", "digest", "framework", "agreement")
_FILES = {name: f"{name}.json" for name in _JSON} | {
    "spec_yaml": "spec.yaml", "spec_json": "spec.json", "steps": "steps.csv", "log": "log.txt",
    "gradients": "gradients.npz", "weights": "weights.safetensors", "adapter": "adapter", "profile": "profile",
    "reserve": ".reserve",
}  # fmt: skip
# The run's own of these are made of those of all ranks; of those rank 0 writes them, and node 0.
_MADE_OF_RANKS, _OF_EACH_RANK, _OF_EACH_NODE = ("steps", "state"), ("applied", "phases"), ("machine", "log")


def create(out: Path, experiment: str, slug: str) -> RunDir:
    """Make a new directory `out/experiment/slug-rN` with the first free N; its state is `running`."""
    parent = out / experiment
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for repeat in range(1, 100_000):
            with suppress(FileExistsError):
                return create_at(parent / f"{slug}-r{repeat}")
    raise MissingError(f"{parent} already holds 100,000 runs of {slug}: choose another --out")


def create_at(path: Path) -> RunDir:
    """Make a directory with the state `running`. Raises FileExistsError, or MissingError for a full disk."""
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
    """Make way for another run of the same name: move this one into the folder's `.superseded/`, which no report
    reads, and return it there; `destination` is where it was to be, if it is elsewhere."""
    with writing(run.path):
        folder = (destination or run).path.parent / ARCHIVED
        folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in folder.glob(f"{run.run_id}.*"))
        while (target := folder / f"{run.run_id}.{number}").exists():
            number += 1
        run.path.rename(target)
    return RunDir(target)


def write_json(path: Path, data: Any, indent: int | None = 1) -> None:
    """Replace `path` with a JSON document, as `write_text` does."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=indent, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` at once, on the disk before it is visible. Raises MissingError if the disk does not take it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            _write_through(temporary, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            (path.parent / _FILES["reserve"]).unlink(missing_ok=True)
            _write_through(temporary, text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be taken away
            temporary.unlink()
        raise disk_error(path, error) from None


def _write_through(path: Path, text: str) -> None:
    # Half a character (from a file name that is no UTF-8) becomes the \udcxx that JSON reads back as the same.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def open_plain_file(path: Path, most: int) -> BufferedReader:
    """Open a file of a store, which is input like any other. Raises OSError where it cannot be, ValueError for what is
    no plain file or larger than `most` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of this name would wait for a writer
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return open(handle, "rb")
    os.close(handle)
    raise ValueError(f"is no plain file of at most {most >> 20} MiB")


def read_bytes(path: Path) -> bytes:
    """Return what a JSON file holds. Raises as `open_plain_file`."""
    with open_plain_file(path, MOST_JSON_BYTES) as file:
        return file.read()


def read_document(
    path: Path, read: Callable[[Path], dict[str, Any]] | None = None
) -> tuple[dict[str, Any], str | None]:
    """Return the object in a JSON file and None; nothing and the reason for what is not the JSON of files of this name
    (`shapes.py`). An absent file is an empty object: a run that was killed has fewer files. `read` reads and parses."""
    try:
        return read(path) if read else parse_document(read_bytes(path), path), None
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, f"{path.name}: cannot be read ({error.strerror})"
    except ValueError as error:
        return {}, f"{path.name}: {error}"


def parse_document(data: bytes, path: Path) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ValueError where it is not what a file of this name holds."""
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON (line {error.lineno})") from None
    except (ValueError, RecursionError):
        raise ValueError("is no UTF-8, nested too deeply or has a number of thousands of digits") from None
    shapes.check(document, shapes.shape_of(path))
    return dict(document)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where it is absent or not what `read_document` takes."""
    return read_document(path)[0]


def gpus_of(machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs of a machine.json that a run has trained on; of an older file the one that stands there."""
    gpus = machine["gpus"] if "gpus" in machine else [machine.get("gpu")]
    return [gpu for gpu in gpus or [] if gpu]


def first_gpu(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first GPU of a machine.json; empty without one."""
    return next(iter(gpus_of(machine)), {})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise MissingError with a way out where the disk does not take what the block writes at `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from None


def disk_error(path: Path, error: OSError) -> MissingError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MissingError(f"{path}: no space left on the disk; free some, or write elsewhere")
    if error.errno == errno.ENOENT and not path.exists():
        return MissingError(f"{path}: its folder was deleted meanwhile; the same command makes it anew")
    return MissingError(f"{path}: cannot be written ({error.strerror}); write elsewhere")


def running() -> dict[str, Any]:
    """Return the state of a run that this process begins; its owner can be checked after a crash or a reboot."""
    owner = process_identity.this_process()
    return {"schema": SCHEMA, "state": "running", "started_at": now(), "owner": owner}


def read_state(run: RunDir) -> dict[str, Any]:
    """Return the state of a run, as `state_of`; with the reason where state.json cannot be read."""
    state, problem = read_document(run.state)
    return state_of(state) if problem is None else {"state": "error", "reason": problem}


def state_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a state.json says. `running` whose owner is gone (killed, or the machine was restarted) is
    `interrupted`; what says no state is `error`."""
    if document.get("state") not in STATES:
        return {"state": "error", "reason": "state.json is missing or says no state that a run has"}
    if document["state"] == "running" and not process_identity.alive(document.get("owner", {})):
        reason = "ftbench was killed or the machine went down during the run"
        return document | {"state": "interrupted", "reason": reason}
    return document


def now() -> str:
    """Return the time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def modified(path: Path) -> float:
    """Return when a file last changed; 0 for one that has gone meanwhile."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def find_runs(path: Path) -> list[RunDir]:
    """Return all run directories at or below `path`, in name order: those that hold a state.json, whatever it is, and
    folders that cannot be looked into."""
    closed: list[OSError] = []
    runs = [folder for folder, is_run in _walk(path, closed.append) if is_run]
    return [RunDir(Path(folder)) for folder in (*runs, *(e.filename for e in closed if isinstance(e, PermissionError)))]


def require_runs(path: Path, unpacked: Path | None = None) -> list[RunDir]:
    """Return what `find_runs` finds at `path`, or where that bundle is `unpacked`. Raises SpecError for nothing."""
    if not os.path.exists(path):  # also for a name that is too long for the disk
        raise SpecError(f"{path}: no such file or directory")
    if not (runs := find_runs(unpacked or path)):
        raise SpecError(f"{path}: holds no run (a run is a directory with a state.json; `ftbench run` makes one)")
    return runs


def _walk(path: Path, on_error: Callable[[OSError], None]) -> Iterator[tuple[str, bool]]:
    """Yield each folder once, what lies behind links last; a link that leads up is not followed."""
    seen, left = {_inode(parent) for parent in Path(os.path.realpath(path)).parents}, [str(path)]
    while left:
        links: list[str] = []
        for folder, folders, files in itertools.chain.from_iterable(os.walk(each, onerror=on_error) for each in left):
            if (inode := _inode(folder)) is None or inode in seen:
                folders.clear()
                continue
            seen.add(inode)
            is_run = _FILES["state"] in (*files, *folders)
            folders[:] = [] if is_run else sorted(name for name in folders if not name.startswith("."))
            links += (link for name in folders if os.path.islink(link := os.path.join(folder, name)))
            yield folder, is_run
        left = links


def _inode(folder: str | Path) -> tuple[int, int] | None:
    """Return what only this folder has; None where it is gone."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino
