"""Which keys of the spec vary between runs, and what their columns are called; repeats as one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core.compare import geometric_mean
from ftbench.report.data.facts import CPU, spec_facts
from ftbench.store.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "spec."  # of the columns that hold a key of the spec
MOST_AXES = 10  # columns of axes that a table for people shows
_SHOWN = ("model.id", "model.weights", "dataset.name", "method.name", "train.batch_size",
          "train.gradient_accumulation_steps")  # fmt: skip


def with_axes(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The frame with a column `spec.<key>` for each key of the resolved specs that varies and that no other column of
    the table shows, and the names of these columns, in the order of the spec."""
    import pandas as pd

    specs = [spec_facts(RunDir(Path(path))) for path in frame["path"]]
    keys = varying_keys(specs, _labels(frame))
    if not keys:
        return frame, []
    columns = pd.DataFrame({PREFIX + key: [spec.get(key, "") for spec in specs] for key in keys}, index=frame.index)
    return pd.concat([frame, columns], axis=1), [PREFIX + key for key in keys]


def varying_keys(specs: Sequence[Mapping[str, str]], labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Keys that have more than one value among the runs that have them. The table's own columns are left out, and so
    is what the label of the model or of the data already tells: a key of that section that is the same wherever the
    label is (`labels`: section → the label of each run)."""
    seen: dict[str, dict[str, None]] = {}
    for spec in specs:
        for key, text in spec.items():
            seen.setdefault(key, {})[text] = None
    varying = [key for key, texts in seen.items() if len(texts) > 1 and key not in _SHOWN]
    return [
        key for key in varying
        if not key.startswith("optimizations.") and not _told(key, specs, labels.get(key.partition(".")[0]))
    ]  # fmt: skip


def _told(key: str, specs: Sequence[Mapping[str, str]], labels: Sequence[str] | None) -> bool:
    if labels is None:
        return False
    texts: dict[str, str] = {}
    return all(texts.setdefault(label, spec.get(key, "")) == spec.get(key, "")
               for label, spec in zip(labels, specs, strict=True))  # fmt: skip


def _labels(frame: pd.DataFrame) -> dict[str, list[str]]:
    from ftbench.report.render.tables import data_labels

    return {"model": [str(model) for model in frame["model"]], "dataset": data_labels(frame)}


def headings(keys: Iterable[str]) -> list[str]:
    """The shortest end of each key that no other key shares: `seed`, or `train.seed` beside `dataset.seed`."""
    keys = [key.removeprefix(PREFIX) for key in keys]
    counts: dict[str, int] = {}
    for key in keys:
        for end in _ends(key):
            counts[end] = counts.get(end, 0) + 1
    return [next((end for end in _ends(key) if counts[end] == 1), key).replace("_", " ") for key in keys]


def _ends(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


# --- repeats ---------------------------------------------------------------------------------------------------------

_MERGED = ("tokens_per_s.real", "samples_per_hour", "samples_per_s", "step_time_s.median", "step_time_s.mean",
           "memory_gb.allocated_peak", "memory_gb.reserved_peak", "memory_gb.device_peak", "mfu", "hfu", "first_step_s",
           "time_to_steady_s", "loss.eval", "loss.last", "energy.joules_per_1k_samples", "model_tflops")  # fmt: skip
RUNS = "runs"


def merge_repeats(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for the runs of the same spec on the same GPU, in the order of their first; `runs` says how many ended
    well of how many. Figures are geometric means of the runs that ended well; the other columns are the first's."""
    import pandas as pd

    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in frame.to_dict("records"):
        record = {str(name): value for name, value in row.items()}
        facts = spec_facts(RunDir(Path(record["path"])))
        key = (tuple(sorted(facts.items())) or record["path"], gpu_of(record))
        groups.setdefault(key, []).append(record)
    return pd.DataFrame.from_records([_merged(group, list(frame.columns)) for group in groups.values()])


def _merged(group: Sequence[dict[str, Any]], columns: Sequence[str]) -> dict[str, Any]:
    ended_well = [record for record in group if record["state"] == "ok"]
    first = dict((ended_well or group)[0])
    figures = {name: geometric_mean(known(ended_well, name)) for name in _MERGED if name in columns}
    failed = [record for record in group if record["state"] != "ok"]
    warnings = dict.fromkeys(warning for record in group for warning in record["warnings"])
    if ended_well and failed:
        how = failed[0]["reason"] or failed[0]["state"]
        warnings |= {f"{len(failed)} of {len(group)} repeats ended otherwise: {how}": None}
    count = str(len(group)) if not failed else f"{len(ended_well)} of {len(group)}"
    return first | figures | {RUNS: count, "warnings": list(warnings)}


def known(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers that `records` have under `name`; a missing or empty one is left out."""
    values = (record.get(name) for record in records)
    return [float(value) for value in values if isinstance(value, (int, float)) and value == value]


def gpu_of(record: Mapping[str, Any]) -> str:
    gpu = record.get("gpu")
    return gpu if isinstance(gpu, str) else CPU
