"""Records of repeats as one record, and the columns for keys that vary."""

from collections.abc import Iterator, Sequence

from ftbench.core.compare import geometric_mean
from ftbench.report.data.axes import PREFIX, varying_keys
from ftbench.report.data.collect import Record, known
from ftbench.report.data.experiments import repeats
from ftbench.report.data.groups import cache_of, runs_of
from ftbench.report.data.names import run_names

RUNS = "runs"
_MERGED = ("tokens_per_s.real", "samples_per_hour", "samples_per_s", "step_time_s.median", "step_time_s.mean",
           "memory_gb.allocated_peak", "memory_gb.reserved_peak", "memory_gb.device_peak", "mfu", "hfu", "first_step_s",
           "time_to_steady_s", "loss.eval", "loss.last", "energy.joules_per_1k_samples", "model_tflops")  # fmt: skip


def with_axes(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records with a `label`, which names each among the others, and a field `spec.<key>` for each key of
    the resolved specs that varies and that no other column of the table shows; and the names of these fields, those
    that tell most first."""
    runs = runs_of(records)
    specs = [run.spec for run in runs]
    labels = {"model": [str(record["model"]) for record in records], "dataset": [run.data for run in runs]}
    keys = varying_keys(specs, labels)
    wider = [record | {"label": name} | {PREFIX + key: spec.get(key, "") for key in keys}
             for record, spec, name in zip(records, specs, run_names(runs), strict=True)]  # fmt: skip
    return wider, [PREFIX + key for key in keys]


def merge_repeats(records: Sequence[Record]) -> list[Record]:
    """Return one record for the runs of the same spec on the same GPU, in the order of their first; `runs` says how
    many ended well of how many. Figures are geometric means of the runs that ended well, that of the first step of
    those with a cold cache where there are any; the rest is the first's."""
    return [_merged([run.record for run in group]) for group in repeats(runs_of(records))]


def _merged(group: Sequence[Record]) -> Record:
    ended_well = [record for record in group if record["state"] == "ok"]
    first = dict((ended_well or group)[0])
    figures = {name: geometric_mean(known(ended_well, name)) for name in _MERGED if name in first}
    if len(group) > 1 and (cold := [record for record in ended_well if cache_of(record) == "cold"]):
        figures["first_step_s"] = geometric_mean(known(cold, "first_step_s"))
    failed = [record for record in group if record["state"] != "ok"]
    warnings = dict.fromkeys(_warnings(group))
    if ended_well and failed:
        how = failed[0]["reason"] or failed[0]["state"]
        warnings |= {f"{len(failed)} of {len(group)} repeats ended otherwise: {how}": None}
    count = str(len(group)) if not failed else f"{len(ended_well)} of {len(group)}"
    return first | figures | {RUNS: count, "warnings": list(warnings)}


def _warnings(group: Sequence[Record]) -> Iterator[str]:
    """Yield each warning once: as it is where it is about all of the repeats, else with those that it is about."""
    about: dict[str, list[str]] = {}
    for number, record in enumerate(group, 1):
        for warning in record["warnings"]:
            about.setdefault(warning, []).append(str(number))
    for warning, numbers in about.items():
        which = f"repeat{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {len(group)}: "
        yield warning if len(numbers) == len(group) else which + warning
