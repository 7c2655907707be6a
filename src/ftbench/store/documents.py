"""The JSON documents of a run, read together. Those that repeats have in common, and that a report asks for again and
again, are read and parsed once: nobody may change them."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.errors import file_problem
from ftbench.store.rundir import MOST_CSV_BYTES, RunDir, open_plain_file, parse_document, read_bytes, read_document

SHARED = ("spec_json", "machine", "applied")


def shared_bytes(path: Path) -> bytes:
    """Return what a JSON file holds, read once for as long as it is the same file. Raises as `open_plain_file`."""
    name = os.fspath(path)  # a key of a cache in half the time that a path is
    status = os.stat(name)
    return _shared_bytes(name, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8192)
def _shared_bytes(name: str, *_: int) -> bytes:
    return read_bytes(Path(name))


@lru_cache(maxsize=8192)
def shared_document(data: bytes, name: str) -> dict[str, Any]:
    """Return what `parse_document` does: for the same text the same object."""
    return parse_document(data, Path(name))


def _shared(path: Path) -> dict[str, Any]:
    return shared_document(shared_bytes(path), path.name)


def read_documents(run: RunDir) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return the documents of a run by their names in `RunDir`, and why the run cannot be read: what is wrong with the
    first of its files that is not what a run has; None where all are."""
    documents, problems = {}, []
    for name in ("state", "spec_json", "machine", "applied", "phases", "summary"):
        documents[name], problem = read_document(getattr(run, name), _shared if name in SHARED else None)
        problems += [problem] if problem else []
    try:
        open_plain_file(run.steps, MOST_CSV_BYTES).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{run.steps.name}: {file_problem(error)}")
    except ValueError as error:
        problems.append(f"{run.steps.name}: {error}")
    return documents, problems[0] if problems else None
