"""Pack runs into one file for other people: a zstd-compressed tar with a manifest of SHA-256 hashes.

The same runs always give the same bytes: files are sorted by name and have neither owners nor dates. A bundle may come
from a stranger. Therefore `unpack` limits the number and size of files, and writes only below the target folder.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench import __version__
from ftbench.core.redact import REDACTED, redact_document, without_secrets
from ftbench.errors import SpecError, file_problem
from ftbench.store.output import output_file
from ftbench.store.ranks import rank_files
from ftbench.store.rundir import RunDir, disk_error, open_plain_file, read_document, read_state, require_runs

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_FILE, MAX_TOTAL, MAX_FILES = 256 * 2**20, 2 * 2**30, 200_000
FILES = ("spec.yaml", "spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "state.json",
         "samples.json", "summary.json")  # fmt: skip
PROFILE = (".json", ".csv", ".txt", ".md")  # the tables in profile/; traces are too large
_MAX_WINDOW = 27  # log2 of the bytes that decompression may keep in memory
_LEVEL = 10


@dataclass(slots=True)
class PackedBundle:
    """Facts about a new bundle. `redacted` is the number of removed secrets. `left_out` lists unfinished runs."""

    runs: int = 0
    files: int = 0
    redacted: int = 0
    left_out: list[str] = field(default_factory=list)


def make(paths: Sequence[Path], output: Path) -> PackedBundle:
    """Pack all runs at or below `paths` into one file. Leave out weights, adapters, logs and secrets.

    Raises:
        SpecError: No run was found, or the output has the wrong suffix.
        MissingError: The disk is full.
    """
    if output.suffix.lower() not in ("", ".zst", ".tzst"):
        name = output.name.partition(".")[0] or "runs"
        raise SpecError(f"-o {output}: a bundle is a tar in zstd; name it {name}.tar.zst")
    bundle = PackedBundle()
    sources = dict(sorted(_sources(paths, bundle).items()))
    bundle.files = len(sources)
    output = output_file(output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    hashes: dict[str, dict[str, Any]] = {}
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    try:
        with zstd.open(temporary, "wb", options=options) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            for name, path in sources.items():
                data, count = _content(path)
                bundle.redacted += count
                hashes[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
                _add(tar, name, data)
            manifest = {"schema": SCHEMA, "ftbench": __version__, "files": hashes}
            _add(tar, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        os.replace(temporary, output)
    except OSError as error:
        raise disk_error(output, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return bundle


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _sources(paths: Sequence[Path], bundle: PackedBundle) -> dict[str, Path]:
    """Return the files to pack: {name in the archive: path}."""
    owners: dict[str, Path] = {}
    sources: dict[str, Path] = {}
    folders = (run.path for path in paths for run in require_runs(path, opened(path) if os.path.isfile(path) else None))
    for run in map(RunDir, dict.fromkeys(Path(os.path.realpath(path)) for path in folders)):
        if read_state(run)["state"] == "running":
            bundle.left_out.append(str(run.path))
            continue
        experiment, run_id = without_secrets(run.path.parent.name), without_secrets(run.run_id)
        name = f"runs/{experiment}/{run_id}"
        for number in range(2, 10_000):  # two machines may have runs of the same name
            if owners.setdefault(name, run.path) == run.path:
                break
            name = f"runs/{experiment}-{number}/{run_id}"
        bundle.runs += 1
        for file in files_of(run):
            sources["/".join([name, *map(without_secrets, file.split("/"))])] = run.path / file
    if not sources:
        raise SpecError("bundle: all runs are still running; bundle them when they have finished")
    return sources


def files_of(run: RunDir) -> Iterator[str]:
    """Yield the names of the files of a run that a bundle contains. Symbolic links are skipped."""
    profile = run.path / "profile"
    tables = sorted(p.name for p in profile.iterdir() if p.suffix in PROFILE) if profile.is_dir() else []
    ranks = [path.name for path in (*rank_files(run), *sorted(run.path.glob("applied.rank*.json")))]
    for name in (*FILES, *ranks, *(f"profile/{table}" for table in tables)):
        path = run.path / name
        if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
            yield name


def _content(path: Path) -> tuple[bytes, int]:
    """Return the bytes of a file without secrets, and the number of removed secrets."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise SpecError(f"{path}: larger than {MAX_FILE >> 20} MiB, the limit for a file of a bundle")
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SpecError(f"{path}: {file_problem(error)}") from None
    cleaned = (_clean_document(text) if path.suffix == ".json" else None) or without_secrets(text)
    return cleaned.encode("utf-8", "surrogateescape"), cleaned.count(REDACTED) - text.count(REDACTED)


def _clean_document(text: str) -> str | None:
    """Remove the secrets from a JSON text. A text without secrets is returned unchanged. Return None if the text is not
    JSON."""
    try:
        document = json.loads(text)
        cleaned = redact_document(document)
    except (ValueError, RecursionError):
        return None
    return text if cleaned == document else json.dumps(cleaned, ensure_ascii=False, indent=1) + "\n"


class _Limited(io.RawIOBase):
    """Reads a stream. Raises ValueError after more than MAX_TOTAL bytes."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream, self._total = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._total += len(data)
        if self._total > MAX_TOTAL:
            raise ValueError(f"refused: larger than {MAX_TOTAL >> 30} GiB when unpacked")
        return data


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a bundle into a new or empty `folder`. Return the manifest, with the hash of each file in `hashes`.

    Raises:
        SpecError: The file is not a bundle or is damaged. In this case, `folder` may contain some of its files.
    """
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; pack it with `ftbench bundle {path} -o runs.tar.zst` first")
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW}
    try:
        with open_plain_file(path, MAX_TOTAL) as file, zstd.open(file, "rb", options=options) as packed:
            limited = _Limited(packed)
            with tarfile.open(fileobj=limited, mode="r|") as tar:
                for count, member in enumerate(tar):
                    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):  # a sparse file may be of any size
                        raise ValueError(f"refused: {member.name!r} is not an ordinary file")
                    if member.size > MAX_FILE or count > MAX_FILES:
                        raise ValueError(f"refused: too many files, or one too large for a run, at {member.name!r}")
                    tar.extract(member, folder, filter="data")
            while limited.read(2**20):
                pass  # zstd compares its checksum at the end
        manifest, problem = read_document(folder / MANIFEST)
        if problem or not manifest:
            raise ValueError(problem or f"refused: {MANIFEST} is missing")
    except (tarfile.TarError, zstd.ZstdError, EOFError) as error:
        raise SpecError(f"{path}: damaged, or neither a folder nor a file of `ftbench bundle` ({error})") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be unpacked ({error.strerror or error})") from None
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None
    if manifest.get("schema") != SCHEMA:
        raise SpecError(f"{path}: has schema {manifest.get('schema')!r}, this ftbench reads {SCHEMA}; update ftbench")
    names = (each for each in folder.rglob("*") if each.is_file())
    hashes = {each.relative_to(folder).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in names}
    return manifest | {"hashes": {name: value for name, value in hashes.items() if name != MANIFEST}}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return a sentence for each difference between the files of an unpacked bundle and the manifest."""
    wanted, hashes = manifest["files"], manifest["hashes"]
    sentences = []
    for name in sorted({*wanted, *hashes}):
        expected = wanted.get(name, {}).get("sha256")
        if name not in hashes:
            sentences.append(f"{name}: in the manifest but not in the archive")
        elif expected is None:
            sentences.append(f"{name}: in the archive but not in the manifest")
        elif hashes[name] != expected:
            sentences.append(f"{name}: its SHA-256 is {hashes[name][:12]}…, the manifest has {expected[:12]}…")
    return sentences


_OPENED: dict[Path, tempfile.TemporaryDirectory[str]] = {}


def opened(path: Path) -> Path:
    """Unpack a bundle and return the folder with its runs. A later call for the same bundle returns the same folder.
    The folder is deleted when this process ends.

    Raises:
        SpecError: The file is not a bundle, or its files differ from its manifest.
    """
    if path not in _OPENED:
        folder = tempfile.TemporaryDirectory(prefix="ftbench-bundle-")
        try:
            if damages := problems(unpack(path, Path(folder.name))):
                raise SpecError(f"{path}: damaged: {damages[0]}; `ftbench verify {path}` lists all problems")
        except SpecError:
            folder.cleanup()
            raise
        _OPENED[path] = folder
    return Path(_OPENED[path].name, "runs")


def shown(path: str) -> str:
    """Return the path of a run for display. The path of a run in a bundle is displayed as BUNDLE:PATH."""
    folders = {f"{folder.name}/runs/": bundle for bundle, folder in _OPENED.items()}
    return next((f"{folders[each]}:{path[len(each) :]}" for each in folders if path.startswith(each)), path)
