"""Hashes of a run's files, written when it ends. They reveal changes that no figure depends on."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ftbench.store.ranks import rank_files
from ftbench.store.rundir import SCHEMA, RunDir, read_json, write_json

# summary.json is recomputed from these.
FILES = ("spec.yaml", "spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "state.json",
         "samples.json")  # fmt: skip


def write(run: RunDir) -> None:
    """Write the SHA-256 of the files of a finished run. Raise MissingError for a full disk."""
    write_json(run.digest, {"schema": SCHEMA, "files": {path.name: sha256_of(path) for path in _files(run)}})


def _files(run: RunDir) -> Iterator[Path]:
    yield from (path for name in FILES if (path := run.path / name).is_file())
    yield from rank_files(run)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed(run: RunDir) -> list[str] | None:
    """Return the names of files that were changed, added or removed after the run; None without a digest."""
    written = read_json(run.digest).get("files")
    if written is None:
        return None
    shown = {path.name: sha256_of(path) for path in _files(run)}
    return sorted(name for name in {*written, *shown} if written.get(name) != shown.get(name))
