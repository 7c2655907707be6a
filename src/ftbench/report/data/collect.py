"""Read run directories into records: one flat dict per run, all with the same keys."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.core.rows import RunSummary
from ftbench.errors import SpecError
from ftbench.report.data.facts import flat
from ftbench.spec.base import shortened
from ftbench.spec.methods import METHODS
from ftbench.store.rundir import RunDir, read_json, require_runs
from ftbench.store.summary import SHARED, as_dict, read_summary

Record = dict[str, Any]
_NOT_BUNDLES = (".html", ".md", ".csv", ".json", ".yaml", ".txt", ".png", ".tex")  # files that users keep next to runs
_SHORT_REASON = 48
_PER_SAMPLE = "energy.joules_per_1k_samples"


def collect(paths: Sequence[Path]) -> list[Record]:
    """Return a record for each run in `paths` and their subfolders.

    Returns:
        One record per run: the fields of its summary with dotted names (`memory_gb.host_peak`), `path`, `started_at`,
        `ended_at`, and `number` (from 1).

    Raises:
        SpecError: a path does not exist or contains no run.
    """
    collected = records(map(_summary, _runs(paths)))
    # A copy of a run, for example in a bundle, does not count as a second repeat.
    collected = list({_copy_key(record): record for record in reversed(collected)}.values())[::-1]
    rank = {name: number for number, name in enumerate(METHODS)}

    def order(record: Record) -> tuple[Any, ...]:
        gpu, method = record["gpu"] or "", rank.get(record["method"], len(rank))
        return record["name"], record["model"], gpu, method, record["batch_size"], record["run_id"]

    return [record | {"number": number} for number, record in enumerate(sorted(collected, key=order), 1)]


def _summary(run: RunDir) -> dict[str, Any]:
    """Return the summary of a run with its path, start time, end time, and the state of the compiler's cache."""
    summary, state = read_summary(run), read_json(run.state)
    cache = summary.get("first_step_cache") or read_json(run.applied).get("compile_cache")  # older runs have it here
    times = {name: state.get(name) for name in ("started_at", "ended_at")}
    return summary | {"path": str(run.path), "first_step_cache": cache or "none", **times}


def records(summaries: Iterable[dict[str, Any]]) -> list[Record]:
    """Convert the contents of summary.json files to flat records. Missing fields are None."""
    dicts = [dict(flat(values)) for values in summaries]
    empty = dict.fromkeys(key for record in dicts for key in record)
    shared = {"contention.contended": True}  # for runs with `measure.share_gpu`
    return [_on_one_basis(empty | record | (shared if SHARED in record["warnings"] else {})) for record in dicts]


def _on_one_basis(record: Record) -> Record:
    """Set samples per second to `real tokens per second / mean sample length in tokens`, and energy accordingly.

    A rate from counted samples is noisy, because a short window may contain mostly long or mostly short samples. This
    rate is only kept if a figure is unknown or if the model generated the tokens (grpo)."""
    counted, tokens = record.get("samples_per_s"), record.get("tokens_per_s.real")
    known = counted and tokens and record.get(_PER_SAMPLE) is not None
    record["energy.joules_per_1m_real_tokens"] = record[_PER_SAMPLE] * counted / tokens * 1e3 if known else None
    length = record.get("dataset.tokens.mean")
    if not (counted and tokens and length) or record.get("tokens_per_s.generated"):
        return record
    sequences, samples = record.get("dataset.tokens.count"), record.get("dataset.samples")
    rate = tokens / length / (sequences / samples if sequences and samples else 1)  # 2 sequences per preference pair
    record |= {"samples_per_s": rate, "samples_per_hour": rate * 3600}
    if joules := record.get(_PER_SAMPLE):
        record[_PER_SAMPLE] = joules * counted / rate
    return record


def speeds(summary: RunSummary) -> tuple[float | None, float | None]:
    """Return samples per hour and joules per 1,000 samples of a run."""
    record = _on_one_basis(dict(flat(as_dict(summary))))
    return figure(record, "samples_per_hour"), figure(record, _PER_SAMPLE)


def _runs(paths: Sequence[Path]) -> list[RunDir]:
    directories: dict[Path, RunDir] = {}
    for path in paths:
        if len(paths) > 1 and path.suffix.lower() in _NOT_BUNDLES and path.is_file():  # from `results/*`
            continue
        unpacked = None
        if os.path.isfile(path):
            from ftbench.store import bundle  # rarely needed

            unpacked = bundle.opened(path)
        runs = require_runs(path, unpacked)
        directories |= {run.path.resolve() if len(paths) > 1 else run.path: run for run in runs}
    if not directories:
        raise SpecError(f"{', '.join(map(str, paths))}: contains no run: name a run, a folder of runs or a bundle")
    return list(directories.values())


def _copy_key(record: Record) -> Any:
    """Return a key that is equal for copies of a run: run id, end time, and size of steps.csv."""
    run = RunDir(Path(record["path"]))
    with suppress(OSError):
        if record["ended_at"]:
            return run.run_id, run.steps.stat().st_size, record["ended_at"]
    return record["path"]


def named_paths(runs: Sequence[Record]) -> list[Record]:
    """Replace the temporary paths of runs from bundles by BUNDLE:PATH in the records."""
    return [each | {"path": named_path(RunDir(Path(each["path"])))} if "path" in each else each for each in runs]


def named_path(run: RunDir) -> str:
    """Return the path of a run as text. For a run in a bundle, return BUNDLE:PATH."""
    unpack = sys.modules.get("ftbench.store.bundle")  # None if the user gave no bundle
    return str(unpack.shown(str(run.path)) if unpack else run.path)


def known(runs: Iterable[Record], name: str) -> list[float]:
    """Return the values of a field over all records, without unknown values."""
    return [value for record in runs if (value := figure(record, name)) is not None]


def figure(record: Mapping[str, Any], name: str) -> float | None:
    """Return the number in a field of a record, or None."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and value == value else None


def data_labels(runs: Sequence[Record]) -> list[str]:
    """Return a label for the data of each record: the data set and its mean sample length in tokens (`alpaca ~110`).

    If a run ended before tokenization, its sample length is unknown. The label then uses the length of other runs on
    the same data set, if these runs agree."""
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
    """Return the state of a run with a shortened reason, for a table."""
    reason = record.get("reason")
    if record["state"] == "ok" or not isinstance(reason, str):
        return str(record["state"]) + (", contended" if record.get("contention.contended") else "")
    return f"{record['state']}: {shortened(reason, _SHORT_REASON)}".replace("oom: out of memory", "oom")


def long_reason(record: Mapping[str, Any]) -> str:
    """Return the full reason if `state_of` shortens it, or an empty string."""
    reason = record.get("reason")
    is_cut = isinstance(reason, str) and len(reason) > _SHORT_REASON and record["state"] != "ok"
    return str(reason) if is_cut else ""
