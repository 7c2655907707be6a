"""Run directories → records: a flat dict for each run, all with the same keys."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.core.rows import RunSummary
from ftbench.core.units import reworded, some
from ftbench.errors import SpecError
from ftbench.spec.methods import METHODS
from ftbench.store.rundir import MOST_CSV_BYTES, NOT_FINITE, RunDir, open_plain_file, read_json, require_runs
from ftbench.store.summary import as_dict, read_summary

Record = dict[str, Any]
_NO_NUMBER = "the loss is not a number"  # so the warning of a summary that has no field for it begins
_BESIDE_RUNS = (".html", ".md", ".csv", ".json", ".yaml", ".txt", ".png", ".tex")  # files that commands write there
_SHORT_REASON = 48
_PER_SAMPLE = "energy.joules_per_1k_samples"


def collect(paths: Sequence[Path]) -> list[Record]:
    """Return the runs at or below `paths`, each with the fields of its summary, nested ones dotted
    (`memory_gb.host_peak`), its `path`, and its `number` among them, counted from 1. Raises SpecError for a
    path that does not exist or holds no run."""
    collected = records(read_summary(run) | {"path": str(run.path)} for run in _runs(paths))
    rank = {name: number for number, name in enumerate(METHODS)}

    def order(record: Record) -> tuple[Any, ...]:
        gpu, method = record["gpu"] or "", rank.get(record["method"], len(rank))
        return record["name"], record["model"], gpu, method, record["batch_size"], record["run_id"]

    return [record | {"number": number} for number, record in enumerate(sorted(collected, key=order), 1)]


def records(summaries: Iterable[dict[str, Any]]) -> list[Record]:
    """Return summaries as they are in summary.json as records, in their order; what one of them lacks is None."""
    flat = [_flat(values) for values in summaries]
    empty = dict.fromkeys(key for record in flat for key in record)
    return [_judged(_on_one_basis(empty | record | _sentences(record))) for record in flat]


def _sentences(record: Record) -> Record:
    """Return the sentences of a run as they are written today: they are without secrets here, which go first."""
    said = {"warnings": list(map(reworded, record["warnings"]))}
    return said | ({"bound.why": reworded(record["bound.why"])} if record.get("bound.why") else {})


def _flat(values: dict[str, Any], prefix: str = "") -> Record:
    flat: Record = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "histogram":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _on_one_basis(record: Record) -> Record:
    """Set samples a second from real tokens a second and the mean length of the data, like every speed: those counted
    in a short window are those that happened to be long or short. As counted where either is not known, and where the
    model itself made most of them."""
    counted, tokens = record.get("samples_per_s"), record.get("tokens_per_s.real")
    length = record.get("dataset.tokens.mean")
    if not (counted and tokens and length) or record.get("tokens_per_s.generated"):
        return record
    sequences, samples = record.get("dataset.tokens.count"), record.get("dataset.samples")
    rate = tokens / (length * (sequences / samples if sequences and samples else 1))  # a pair is two sequences
    record |= {"samples_per_s": rate, "samples_per_hour": rate * 3600}
    if joules := record.get(_PER_SAMPLE):
        record[_PER_SAMPLE] = joules * counted / rate
    return record


def speeds(summary: RunSummary) -> tuple[float | None, float | None]:
    """Return samples an hour and joules per 1,000 samples of a run, as every table has them."""
    record = _on_one_basis(_flat(as_dict(summary)))
    return figure(record, "samples_per_hour"), figure(record, _PER_SAMPLE)


def _judged(record: Record) -> Record:
    """Call a run failed whose loss or gradient became NaN or infinite, however it ended."""
    if record["state"] != "ok":
        return record
    broken = [text for text in record["warnings"] if text.startswith(_NO_NUMBER)]
    if record.get("learning.state") == NOT_FINITE and not broken:
        count, first = record.get("learning.count"), record.get("learning.first_step")
        broken = [f"loss or gradient norm is not a number in {some(count or 0, 'step')}, first in step {first}"]
    return record | {"state": NOT_FINITE, "reason": broken[0]} if broken else record


def _runs(paths: Sequence[Path]) -> list[RunDir]:
    directories: dict[Path, RunDir] = {}
    for path in paths:
        if len(paths) > 1 and _is_no_bundle(path):  # as `results/*` names what lies beside runs
            continue
        runs = require_runs(path, _unpacked(path) if os.path.isfile(path) else None)
        directories |= {run.path.resolve() if len(paths) > 1 else run.path: run for run in runs}
    if not directories:
        raise SpecError(f"{', '.join(map(str, paths))}: no run, and no folder or bundle of runs, is among these")
    alike = {path: (run.run_id, _size(run.steps)) for path, run in directories.items()}
    times, distinct = Counter(alike.values()), dict[Any, RunDir]()
    for path, run in directories.items():  # to read every run's steps would take longer than the report
        distinct.setdefault(_content(run) if times[alike[path]] > 1 else path, run)
    return list(distinct.values())


def _size(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_size
    return None


def _is_no_bundle(path: Path) -> bool:
    """Return whether a path is a file of text, which no bundle is: a page, a table, a note."""
    return path.suffix.lower() in _BESIDE_RUNS and path.is_file()


def _content(run: RunDir) -> Any:
    """Return what makes a copy of a run the same run: given twice, in a folder and in a bundle, it is no second
    repeat."""
    try:
        with open_plain_file(run.steps, MOST_CSV_BYTES) as file:
            steps = hashlib.file_digest(file, "sha256").digest()
    except (OSError, ValueError):
        return run.path.resolve()
    return run.run_id, steps, read_json(run.state).get("ended_at")


def _unpacked(path: Path) -> Path:
    from ftbench.store.bundle import unpack

    return unpack.opened(path)


def named_paths(runs: Sequence[Record]) -> list[Record]:
    """Return the records with the paths that people know: a run out of a bundle lies in a copy that is gone soon."""
    unpack = sys.modules.get("ftbench.store.bundle.unpack")
    if unpack is None:  # no bundle was opened
        return list(runs)
    return [record | {"path": unpack.shown(str(record["path"]))} if "path" in record else record for record in runs]


def known(runs: Iterable[Record], name: str) -> list[float]:
    """Return the numbers that records have under `name`; a missing or empty one is left out."""
    return [value for record in runs if (value := figure(record, name)) is not None]


def figure(record: Mapping[str, Any], name: str) -> float | None:
    """Return the number that a record has under `name`; None where there is none."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and value == value else None


def data_labels(runs: Sequence[Record]) -> list[str]:
    """Return the data set of each record and, where known, the mean length of its samples in tokens: `alpaca ~110`. A
    run that ended before it knew the length has that of the others with the same data set, if they agree."""
    lengths: dict[str, set[str]] = {}
    texts = []
    for record in runs:
        name, mean = record.get("dataset.name"), record.get("dataset.tokens.mean")
        text = f"{name} ~{mean:.0f}" if name and mean is not None else ""
        texts.append((name or "unknown", text))
        if text:
            lengths.setdefault(name or "", set()).add(text)
    return [text or (next(iter(lengths[name])) if len(lengths.get(name, ())) == 1 else name) for name, text in texts]


def state_of(record: Mapping[str, Any]) -> str:
    """Return how a run ended, shortened to fit a table."""
    reason = record.get("reason")
    if record["state"] == "ok" or not isinstance(reason, str):
        return str(record["state"]) + (", contended" if record.get("contention.contended") else "")
    if record["state"] == "skipped":
        return f"skipped ({reason})"
    short = reason if len(reason) <= _SHORT_REASON else reason[: _SHORT_REASON - 1] + "…"
    return f"{record['state']}: {short}".replace("oom: out of memory", "oom")


def long_reason(record: Mapping[str, Any]) -> str:
    """Return the reason that `state_of` had to shorten; empty where it stands there in full."""
    reason = record.get("reason")
    shortened = isinstance(reason, str) and len(reason) > _SHORT_REASON and record["state"] not in ("ok", "skipped")
    return str(reason) if shortened else ""
