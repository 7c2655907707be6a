"""Reading a bundle, whoever packed it.

An archive is read as if an enemy had packed it: plain files only, each below the folder it is unpacked into, named by
the manifest, with limits on their number and size. tarfile parses single headers and nothing more: its own reader
follows links and takes headers of any length into memory.
"""

import hashlib
import sys
import tarfile
import tempfile
from functools import cache
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any

from ftbench.errors import SpecError, file_problem
from ftbench.store.rundir import open_plain_file, parse_document

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_FILE = 256 * 2**20
MAX_TOTAL = 2 * 2**30
MAX_FILES = 200_000
BLOCK = 512
_TAIL = 20 * BLOCK  # a tar may be filled up to this


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a bundle into `folder` (new or empty) and return its manifest, with the hash of each file in `hashes`.
    Raises SpecError for whatever is no bundle; `folder` may then hold a part of it."""
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; `ftbench bundle {path}` makes the file of it that can be checked")
    try:
        with open_plain_file(path, MAX_TOTAL) as file:
            if file.read(4) != b"\x28\xb5\x2f\xfd":  # RFC 8878, section 3.1.1
                raise SpecError(f"{path}: is no bundle (not zstd); `ftbench bundle` makes one")
            file.seek(0)
            limits: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}
            with zstd.open(file, "rb", options=limits) as packed:
                return _unpack(path, packed, folder)
    except (EOFError, zstd.ZstdError):
        raise SpecError(f"{path}: is cut short or damaged; get it again") from None
    except (tarfile.HeaderError, UnicodeError):
        raise SpecError(f"{path}: is no bundle (no tar of plain files); `ftbench bundle` makes one") from None
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be unpacked ({error.strerror or error})") from None


def _unpack(path: Path, packed: BufferedIOBase, folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = {}
    hashes: dict[str, str] = {}
    total = 0
    while (header := _exactly(packed, BLOCK)) != b"\0" * BLOCK:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        name, total = info.name, total + info.size
        if problem := _refusal(info, first=not manifest, seen=name in hashes):
            raise SpecError(f"{path}: refused: {problem}")
        if not 0 <= info.size <= MAX_FILE or total > MAX_TOTAL or len(hashes) >= MAX_FILES:
            raise SpecError(f"{path}: refused: more or larger files than runs have, at {name!r}")
        data = _exactly(packed, info.size)
        if not manifest:
            manifest = _manifest(path, data)
        else:
            hashes[name] = hashlib.sha256(data).hexdigest()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.write(data)
        _exactly(packed, -info.size % BLOCK)
    if packed.read(_TAIL + 1).strip(b"\0") or packed.read(1):  # to the end, where zstd's own checksum stands
        raise SpecError(f"{path}: refused: holds something behind its end")
    if not manifest:
        raise SpecError(f"{path}: is empty; `ftbench bundle` makes one")
    return manifest | {"hashes": hashes}


def _refusal(info: tarfile.TarInfo, first: bool, seen: bool) -> str | None:
    if problem := unsafe(info.name):
        return problem
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return f"{info.name!r} is a link, a device or a folder; a bundle holds plain files"
    if first != (info.name == MANIFEST):
        return f"{MANIFEST} must be its first file"
    return f"{info.name!r} stands in it twice" if seen else None


def unsafe(name: str) -> str | None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or name != "/".join(parts):
        return f"{name!r} leads out of the folder that it is unpacked into"
    if not name.isprintable():
        return f"{name!r} holds characters that cannot be seen"
    return None


def _exactly(packed: BufferedIOBase, size: int) -> bytes:
    data = packed.read(size) if size else b""
    if len(data) < size:
        raise EOFError
    return data


def _manifest(path: Path, data: bytes) -> dict[str, Any]:
    try:
        manifest = parse_document(data, Path(MANIFEST))
    except ValueError as error:
        raise SpecError(f"{path}: its {MANIFEST} cannot be read ({error})") from None
    if manifest.get("schema") != SCHEMA:
        raise SpecError(
            f"{path}: is of schema {manifest.get('schema')!r} and this ftbench reads {SCHEMA}: update ftbench"
        )
    return manifest


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what an unpacked bundle holds and its manifest does not say, or the other way round."""
    wanted, hashes = manifest["files"], manifest["hashes"]
    sentences = []
    for name in sorted({*wanted, *hashes}):
        said = wanted.get(name, {}).get("sha256")
        if name not in hashes:
            sentences.append(f"{name}: is in the manifest and not in the archive")
        elif said is None:
            sentences.append(f"{name}: is in the archive and not in the manifest")
        elif hashes[name] != said:
            sentences.append(f"{name}: its SHA-256 is {hashes[name][:12]}… and the manifest says {said[:12]}…")
    return sentences


def opened(path: Path) -> Path:
    """Return the folder of a bundle's runs, unpacked once and until this process ends. Raises SpecError for what is no
    bundle, or one whose files are not those that its manifest names."""
    try:
        modified = path.stat().st_mtime_ns
    except OSError as error:
        raise SpecError(f"{path}: {file_problem(error)}") from None
    folder = Path(_unpacked(path.resolve(), modified).name) / "runs"
    _OPENED[f"{folder}/"] = path
    return folder


@cache
def _unpacked(path: Path, modified: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="ftbench-bundle-")
    try:
        if damages := problems(unpack(path, Path(folder.name))):
            raise SpecError(f"{path}: is damaged: {damages[0]} (`ftbench verify {path}` tells all)")
    except SpecError:
        folder.cleanup()
        raise
    return folder


_OPENED: dict[str, Path] = {}


def shown(path: str) -> str:
    """Return the path of a run for people: of one out of a bundle, the bundle's and where in it."""
    return next(
        (f"{bundle}:{path[len(folder) :]}" for folder, bundle in _OPENED.items() if path.startswith(folder)), path
    )
