"""Runs in one file that can be sent: a tar in zstd with a manifest of SHA-256 hashes; reading one, whoever packed it.

The bytes depend on the runs alone: files in the order of their names, no owners and no dates but those of the runs.
Zstandard is what Python itself has from 3.14 on (PEP 784); before that its backport by the same authors, with the same
interface, so that nothing here changes when it goes.

An archive is read as if an enemy had packed it: plain files only, each below the folder it is unpacked into, named by
the manifest, with limits on their number and size. tarfile parses single headers and nothing more: its own reader
follows links and takes headers of any length into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any

from ftbench import __version__
from ftbench.core.redact import redact
from ftbench.errors import SpecError
from ftbench.rundir import RunDir, disk_error, find_runs, read_state

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SCHEMA = 1
MANIFEST = "manifest.json"
FILES = ("spec.yaml", "spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "summary.json",
         "state.json", "samples.json")  # fmt: skip
PROFILE = (".json", ".csv", ".txt", ".md")  # of the tables in profile/; traces stay at home
MAX_FILE = 256 * 2**20
MAX_TOTAL = 2 * 2**30
MAX_FILES = 200_000
_BLOCK = 512
_TAIL = 20 * _BLOCK  # a tar may be filled up to this
_LEVEL = 10


@dataclass(slots=True)
class Made:
    """What went into a bundle; `redacted` counts the secrets that did not, `left_out` names runs still going on."""

    runs: int = 0
    files: int = 0
    redacted: int = 0
    left_out: list[str] = field(default_factory=list)


# --- making one ------------------------------------------------------------------------------------------------------


def make(paths: Sequence[Path], output: Path, with_logs: bool = False) -> Made:
    """Bundles all runs at or below `paths`: what measures and describes them, without weights, adapters and (unless
    `with_logs`) what the libraries printed. Raises SpecError where there is no run, MissingError for a full disk."""
    made = Made()
    sources = dict(sorted(_sources(paths, with_logs, made).items()))
    hashes: dict[str, dict[str, Any]] = {}
    for name, path in sources.items():
        data, count = _content(path)
        made.redacted += count
        hashes[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    made.files = len(sources)
    manifest = {"schema": SCHEMA, "ftbench": __version__, "made_at": _made_at(sources), "files": hashes}
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with zstd.open(temporary, "wb", options=_options()) as packed:
            _add(packed, MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
            for name, path in sources.items():
                data, _ = _content(path)
                if hashlib.sha256(data).hexdigest() != hashes[name]["sha256"]:
                    raise SpecError(f"{path}: changed while it was being bundled; bundle again once the run is over")
                _add(packed, name, data)
            packed.write(b"\0" * 2 * _BLOCK)
        os.replace(temporary, output)
    except OSError as error:
        raise disk_error(output, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    return made


def _options() -> dict[int, int]:
    return {zstd.CompressionParameter.compression_level: _LEVEL, zstd.CompressionParameter.checksum_flag: 1}


def _sources(paths: Sequence[Path], with_logs: bool, made: Made) -> dict[str, Path]:
    """Names in the archive and the files that they stand for."""
    taken: dict[str, Path] = {}
    found: dict[str, Path] = {}
    for run in _runs(paths):
        if read_state(run)["state"] == "running":
            made.left_out.append(str(run.path))
            continue
        name = folder = f"runs/{run.path.parent.name}/{run.run_id}"
        for number in range(2, 10_000):  # two machines may have a run of the same name
            if taken.setdefault(name, run.path) == run.path:
                break
            name = f"runs/{run.path.parent.name}-{number}/{run.run_id}"
        made.runs += 1
        for file in _files_of(run, with_logs):
            target = f"{name}/{file}"
            if (problem := _unsafe(target)) or len(target.encode("utf-8", "replace")) > 250:
                raise SpecError(f"{run.path}: {problem or 'its name is too long'}: rename the folder ({folder})")
            found[target] = run.path / file
    if not found:
        raise SpecError("bundle: every run found is still going on; bundle again once they are over")
    return found


def _runs(paths: Sequence[Path]) -> list[RunDir]:
    found: dict[Path, RunDir] = {}
    for path in paths:
        if not path.is_dir():
            raise SpecError(f"{path}: " + ("is no directory of runs" if path.exists() else "no such directory"))
        runs = find_runs(path.resolve())
        if not runs:
            raise SpecError(f"{path}: holds no run (a run is a directory with a state.json; `ftbench run` makes one)")
        found |= {run.path: run for run in runs}
    return list(found.values())


def _files_of(run: RunDir, with_logs: bool) -> Iterator[str]:
    """Only what is known, so that nothing else in the directory leaves the machine; a link is no file."""
    profile = run.path / "profile"
    tables = sorted(p.name for p in profile.iterdir() if p.suffix in PROFILE) if profile.is_dir() else []
    for name in (*FILES, *(["log.txt"] if with_logs else []), *(f"profile/{table}" for table in tables)):
        path = run.path / name
        if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
            yield name


def _content(path: Path) -> tuple[bytes, int]:
    """A file's bytes without secrets, and how many there were."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise SpecError(f"{path}: larger than {MAX_FILE >> 20} MiB, which no file of a run is")
        text, count = redact(path.read_bytes().decode("utf-8", "surrogateescape"), os.environ)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    return text.encode("utf-8", "surrogateescape"), count


def _made_at(sources: dict[str, Path]) -> str | None:
    """When the last of the runs ended: the clock of today would make every archive of the same runs another one."""
    ends = [read_state(RunDir(path.parent)).get("ended_at") for path in sources.values() if path.name == "state.json"]
    return max((end for end in ends if isinstance(end, str)), default=None)


def _add(packed: BufferedIOBase, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    packed.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
    packed.write(data + b"\0" * (-len(data) % _BLOCK))


# --- reading one -----------------------------------------------------------------------------------------------------


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpacks a bundle into `folder` (new or empty) and returns its manifest, with the hash found of each file in
    `found`. Raises SpecError for whatever is no bundle; `folder` may then hold a part of it."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"\x28\xb5\x2f\xfd":  # RFC 8878, section 3.1.1
                raise SpecError(f"{path}: is no bundle (not zstd); `ftbench bundle` makes one")
        limits: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}
        with zstd.open(path, "rb", options=limits) as packed:
            return _unpack(path, packed, folder)
    except (EOFError, zstd.ZstdError):
        raise SpecError(f"{path}: is cut short or damaged; get it again") from None
    except (tarfile.HeaderError, UnicodeError):
        raise SpecError(f"{path}: is no bundle (no tar of plain files); `ftbench bundle` makes one") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be unpacked ({error.strerror or error})") from None


def _unpack(path: Path, packed: BufferedIOBase, folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = {}
    found: dict[str, str] = {}
    total = 0
    while (header := _exactly(packed, _BLOCK)) != b"\0" * _BLOCK:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        name, total = info.name, total + info.size
        if problem := _refusal(info, first=not manifest, seen=name in found):
            raise SpecError(f"{path}: refused: {problem}")
        if not 0 <= info.size <= MAX_FILE or total > MAX_TOTAL or len(found) >= MAX_FILES:
            raise SpecError(f"{path}: refused: more or larger files than runs have, at {name!r}")
        if not manifest:
            manifest = _manifest(path, _exactly(packed, info.size))
        else:
            found[name] = _write(packed, folder / name, info.size)
        _exactly(packed, -info.size % _BLOCK)
    if packed.read(_TAIL + 1).strip(b"\0") or packed.read(1):  # to the end, where zstd's own checksum stands
        raise SpecError(f"{path}: refused: holds something behind its end")
    if not manifest:
        raise SpecError(f"{path}: is empty; `ftbench bundle` makes one")
    return manifest | {"found": found}


def _refusal(info: tarfile.TarInfo, first: bool, seen: bool) -> str | None:
    if problem := _unsafe(info.name):
        return problem
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return f"{info.name!r} is a link, a device or a folder; a bundle holds plain files"
    if first != (info.name == MANIFEST):
        return f"{MANIFEST} must be its first file"
    return f"{info.name!r} stands in it twice" if seen else None


def _unsafe(name: str) -> str | None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or name != "/".join(parts):
        return f"{name!r} leads out of the folder that it is unpacked into"
    if not name.isprintable():
        return f"{name!r} holds characters that cannot be seen"
    return None


def _exactly(packed: BufferedIOBase, size: int) -> bytes:
    data = packed.read(size) if size else b""
    while len(data) < size:
        if not (more := packed.read(size - len(data))):
            raise EOFError
        data += more
    return data


def _write(packed: BufferedIOBase, target: Path, size: int) -> str:
    """Copies the next `size` bytes into a new file; returns their hash."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        while size:
            piece = _exactly(packed, min(size, 2**20))
            size -= len(piece)
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _manifest(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise SpecError(f"{path}: its {MANIFEST} cannot be read")
    if found.get("schema") != SCHEMA:
        raise SpecError(f"{path}: is of schema {found.get('schema')!r} and this ftbench reads {SCHEMA}: update ftbench")
    return found


def problems(manifest: dict[str, Any]) -> list[str]:
    """What an unpacked bundle holds and its manifest does not say, or the other way round."""
    wanted, found = manifest["files"], manifest["found"]
    sentences = []
    for name in sorted({*wanted, *found}):
        said = wanted[name].get("sha256") if isinstance(wanted.get(name), dict) else None
        if name not in found:
            sentences.append(f"{name}: is in the manifest and not in the archive")
        elif said is None:
            sentences.append(f"{name}: is in the archive and not in the manifest")
        elif found[name] != said:
            sentences.append(f"{name}: its SHA-256 is {found[name][:12]}… and the manifest says {str(said)[:12]}…")
    return sentences


@cache
def _kept(path: Path, modified: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="ftbench-bundle-")
    try:
        found = problems(unpack(path, Path(folder.name)))
    except SpecError:
        folder.cleanup()
        raise
    if found:
        folder.cleanup()
        raise SpecError(f"{path}: is damaged: {found[0]} (`ftbench verify {path}` tells all)")
    return folder


def opened(path: Path) -> Path:
    """The folder of a bundle's runs, unpacked once and until this process ends. Raises SpecError for what is no
    bundle, or one whose files are not those that its manifest names."""
    try:
        modified = path.stat().st_mtime_ns
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    return Path(_kept(path.resolve(), modified).name) / "runs"
