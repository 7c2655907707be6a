"""Runs in one file that can be sent: a tar in zstd with a manifest of SHA-256 hashes (`unpack.py` reads one).

The bytes depend on the runs alone: files in the order of their names, no owners and no dates but those of the runs.
Zstandard is what Python itself has from 3.14 on (PEP 784); before that comes its backport, with the same interface, so
that nothing here changes when it goes.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from ftbench import __version__
from ftbench.core.redact import REDACTED, redact, redact_document, without_secrets
from ftbench.errors import SpecError, file_problem
from ftbench.store import digests
from ftbench.store.bundle.unpack import BLOCK, MANIFEST, MAX_FILE, SCHEMA, unsafe, zstd
from ftbench.store.output import output_file
from ftbench.store.ranks import rank_files
from ftbench.store.rundir import RunDir, disk_error, read_state, require_runs

FILES = (*digests.FILES, "summary.json", "digest.json")
PROFILE = (".json", ".csv", ".txt", ".md")  # of the tables in profile/; traces stay at home
_LEVEL = 10


@dataclass(slots=True)
class Made:
    """What went into a bundle; `redacted` counts the secrets that did not, `left_out` names runs still going on."""

    runs: int = 0
    files: int = 0
    redacted: int = 0
    left_out: list[str] = field(default_factory=list)


def make(paths: Sequence[Path], output: Path, with_logs: bool = False) -> Made:
    """Bundle all runs at or below `paths`: what measures and describes them, without weights, adapters and (unless
    `with_logs`) what the libraries printed. Raises SpecError where there is no run, MissingError for a full disk."""
    if output.suffix.lower() not in ("", ".zst", ".tzst"):
        name = output.name.partition(".")[0] or "runs"
        raise SpecError(f"-o {output}: a bundle is a tar in zstd: name it {name}.tar.zst")
    made = Made()
    sources = dict(sorted(_sources(paths, with_logs, made).items()))
    hashes: dict[str, dict[str, Any]] = {}
    for name, path in sources.items():
        data, count = _content(path)
        made.redacted += count
        hashes[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        hashes[name] |= {"redacted": count} if count else {}
    made.files = len(sources)
    manifest = {"schema": SCHEMA, "ftbench": __version__, "made_at": _made_at(sources), "files": hashes}
    output = output_file(output, stream=False)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    how: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    try:
        with zstd.open(temporary, "wb", options=how) as packed:
            _add(packed, MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
            for name, path in sources.items():
                data, _ = _content(path)
                if hashlib.sha256(data).hexdigest() != hashes[name]["sha256"]:
                    raise SpecError(f"{path}: changed while it was being bundled; bundle again once the run is over")
                _add(packed, name, data)
            packed.write(b"\0" * 2 * BLOCK)
        os.replace(temporary, output)
    except OSError as error:
        raise disk_error(output, error) from None
    finally:
        with suppress(OSError):  # where nothing can be written, nothing can be taken away
            temporary.unlink()
    return made


def _sources(paths: Sequence[Path], with_logs: bool, made: Made) -> dict[str, Path]:
    """Return names in the archive and the files that they stand for."""
    taken: dict[str, Path] = {}
    sources: dict[str, Path] = {}
    folders = (run.path for path in paths for run in require_runs(Path(os.path.realpath(path))))
    for run in map(RunDir, dict.fromkeys(Path(os.path.realpath(path)) for path in folders)):
        if read_state(run)["state"] == "running":
            made.left_out.append(str(run.path))
            continue
        experiment, run_id = without_secrets(run.path.parent.name), without_secrets(run.run_id)
        name = folder = f"runs/{experiment}/{run_id}"
        for number in range(2, 10_000):  # two machines may have a run of the same name
            if taken.setdefault(name, run.path) == run.path:
                break
            name = f"runs/{experiment}-{number}/{run_id}"
        made.runs += 1
        for file in files_of(run, with_logs):
            target = "/".join([name, *map(without_secrets, file.split("/"))])
            if (problem := unsafe(target)) or len(target.encode("utf-8", "replace")) > 250:
                raise SpecError(f"{run.path}: {problem or 'its name is too long'}: rename the folder ({folder})")
            sources[target] = run.path / file
    if not sources:
        raise SpecError("bundle: every run found is still going on; bundle again once they are over")
    return sources


def files_of(run: RunDir, with_logs: bool) -> Iterator[str]:
    """Yield only what is known, so that nothing else in the directory leaves the machine; a link is no file."""
    profile = run.path / "profile"
    tables = sorted(p.name for p in profile.iterdir() if p.suffix in PROFILE) if profile.is_dir() else []
    ranks = [path.name for path in rank_files(run)]
    for name in (*FILES, *ranks, *(["log.txt"] if with_logs else []), *(f"profile/{table}" for table in tables)):
        path = run.path / name
        if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
            yield name


def _content(path: Path) -> tuple[bytes, int]:
    """Return a file's bytes without secrets, and how many there were."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise SpecError(f"{path}: larger than {MAX_FILE >> 20} MiB, which no file of a run is")
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SpecError(f"{path}: {file_problem(error)}") from None
    cleaned = (_clean_document(text) if path.suffix == ".json" else None) or redact(text, os.environ)[0]
    return cleaned.encode("utf-8", "surrogateescape"), cleaned.count(REDACTED) - text.count(REDACTED)


def _clean_document(text: str) -> str | None:
    """Return a JSON document without secrets, as it is where it has none; None for what is no JSON."""
    try:
        document = json.loads(text)
        cleaned = redact_document(document)
    except (ValueError, RecursionError):
        return None
    return text if cleaned == document else json.dumps(cleaned, ensure_ascii=False, indent=1) + "\n"


def _made_at(sources: dict[str, Path]) -> str | None:
    """Return when the last of the runs ended: today's date would make each archive of them another one."""
    ends = [read_state(RunDir(path.parent)).get("ended_at") for path in sources.values() if path.name == "state.json"]
    return max((end for end in ends if isinstance(end, str)), default=None)


def _add(packed: BufferedIOBase, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    packed.write(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
    packed.write(data + b"\0" * (-len(data) % BLOCK))
