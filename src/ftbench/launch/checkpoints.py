"""The files of a model's directory, looked at before a process is started for them: complete, and what their names say.

The library that reads them says of damage only where in its own code it was noticed, or waits at a pipe for ever.
"""

import json
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from ftbench.errors import file_problem, json_problem
from ftbench.store.rundir import open_plain_file

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES, _MOST_HEADER = 2**46, 100_000_000  # the second as safetensors itself has it
_WAY_OUT = "get it again, or set model.weights=random to measure the same shape without them"


def problem(folder: Path) -> str | None:
    """Return in a sentence why the weights in a model's directory cannot be loaded; None where nothing is seen."""
    if not folder.is_dir():
        return f"{folder}: no such directory"
    if not (folder / "config.json").is_file():
        return f"{folder}: holds no config.json, so it is no model directory"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: holds a config.json and no weights (*.safetensors); copy them there, or set "
            "model.weights=random to measure the same shape without them"
        )
    try:
        for name in _files(folder):
            _require_whole(folder / name)
    except OSError as error:
        return f"{error.filename}: {file_problem(error)}; {_WAY_OUT}"
    except _DamagedError as error:
        return f"{error}; {_WAY_OUT}"
    return None


class _DamagedError(Exception):
    """A file is not what its name says."""


def _files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights: the one that holds all, or those that the index names."""
    index = folder / _INDEX
    if (folder / _WHOLE).exists() or not index.exists():
        return [_WHOLE] if (folder / _WHOLE).exists() else []
    try:
        with open_plain_file(index, _MOST_HEADER) as file:
            document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"{index}: cannot be read as JSON ({json_problem(error)})") from None
    shards = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shards, dict) or not shards or not isinstance(document.get("metadata"), dict):
        raise _DamagedError(f"{index}: is no index of weights: it lacks `metadata`, or `weight_map` that names files")
    for name in (names := sorted(set(map(str, shards.values())))):
        if PurePosixPath(name).name != name:
            raise _DamagedError(f"{index}: names {name!r}, which is no file beside it")
    return names


def _require_whole(path: Path) -> None:
    status = path.stat()
    if reason := _damage(path, status.st_size, status.st_mtime_ns):
        raise _DamagedError(f"{path}: {reason}")


@lru_cache(maxsize=4096)  # asked again for each cell of a sweep
def _damage(path: Path, size: int, _: int) -> str | None:
    """Return what is wrong with a safetensors file by its header: eight bytes of length, JSON with the place of each
    tensor, and as many bytes as those places take (its format's own specification)."""
    damaged = "is cut short or damaged: no whole safetensors file"
    try:
        with open_plain_file(path, _MOST_BYTES) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + length or length > _MOST_HEADER:
                return damaged
            header: Any = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return None if size == 8 + length + max(ends, default=0) else damaged
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return damaged
