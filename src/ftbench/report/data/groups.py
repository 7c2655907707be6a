"""Group repeated runs into cells, give names to cells, and merge the records of repeated runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ftbench.core.compare import geometric_mean
from ftbench.core.hardware import canonical_name
from ftbench.core.stats import grouped_by
from ftbench.report.data import axes
from ftbench.report.data.axes import FRAMEWORK, PREFIX, TRL, variant_of
from ftbench.report.data.cells import DURATION, Cell, Run, gpu_of
from ftbench.report.data.collect import Record, data_labels, known
from ftbench.report.data.facts import CARD, COMMIT, CPU, IMPORTED, LIMIT, REWARD, machine_facts, spec_facts
from ftbench.spec.base import shortened
from ftbench.store.rundir import RunDir

DATA = "dataset.hash"  # hash of the training tokens
RUNS = "runs"
_LIST_MARKS = str.maketrans("", "", '[]"')
_MAX_LETTERS = 24  # longest text of a fact in a name


def runs_of(records: Sequence[Record]) -> list[Run]:
    """Convert records to runs with settings, facts about the machine, and a label of the data set."""
    labels = data_labels(records)
    runs = []
    for record, label in zip(records, labels, strict=True):
        run = RunDir(Path(str(record["path"])))
        runs.append(Run(record, spec_facts(run), machine_facts(run), label))
    return runs


# --- repeats ---------------------------------------------------------------------------------------------------------


def repeats(runs: Iterable[Run], axis: str = "") -> list[list[Run]]:
    """Group repeated runs. The groups are in the order of their first runs.

    Repeats have the same spec, card, power limit, commit and tokens. If `axis` is a fact about the machine, repeats
    also agree in `axis`. An edited data file or another chat template changes the tokens, so such runs are not repeats.
    A run that ended before tokenization counts as a repeat of the first tokenized run of its spec.
    """
    same = (axis, LIMIT, CARD, COMMIT)
    keyed = [((identity(run), *map(run.ran.get, same)), run.ran.get(DATA), run) for run in runs]
    first = {spec: data for spec, data, _ in reversed(keyed) if data}
    groups = grouped_by(keyed, lambda each: (each[0], each[1] or first.get(each[0])))
    return [[run for _, _, run in group] for group in groups.values()]


def identity(run: Run) -> Any:
    """Return a key that is equal for runs of the same spec on the same kind of GPU. Imported runs have unique keys."""
    spec = None if IMPORTED in run.spec else frozenset(run.spec.items())
    return spec or run.record["path"], run.record.get("gpu") or CPU, run.ran.get(REWARD)


def cells_of(runs: Iterable[Run], axis: str = "") -> list[Cell]:
    """Group repeated runs into cells, in the order of their first runs. See `repeats` for `axis`."""
    groups = repeats(runs, axis)
    facts = [_facts(group) for group in groups]
    return named([Cell(shared, tuple(group), "") for shared, group in zip(facts, groups, strict=True)], axis)


def named(cells: Iterable[Cell], axis: str = "") -> list[Cell]:
    """Give each cell (repeated runs of one spec) a name and return the cells. To make the names unique, append settings
    or machine facts that differ."""
    cells = [replace(cell, variant=variant_of(cell.facts)) for cell in cells]
    others = {(cell.workload, cell.variant) for cell in cells if cell.facts.get(FRAMEWORK, TRL) != TRL}
    by = (axes.name_prefix(cell.facts) * ((cell.workload, cell.variant) in others) for cell in cells)
    cells = [replace(cell, variant=name + cell.variant) for cell, name in zip(cells, by, strict=True)]
    same_name = grouped_by(cells, lambda cell: (cell.workload, cell.facts["gpu"], cell.name))
    suffixes = {id(cell): f" ({text})" for group in same_name.values() if len(group) > 1
                for cell, text in zip(group, _distinct(group, axis), strict=True)}  # fmt: skip
    return [replace(cell, variant=cell.variant + suffixes.get(id(cell), "")) for cell in cells]


def _facts(group: Sequence[Run]) -> dict[str, str]:
    first = group[0]
    facts = {"gpu": gpu_of(first.record), **first.spec}
    complete = [run for run in group if run.ok] or group  # failed runs record less
    for key in dict.fromkeys(key for run in group for key in run.ran):
        texts = dict.fromkeys(run.ran.get(key, "unknown") for run in complete)
        if texts.keys() != {"unknown"}:
            facts[key] = " / ".join(texts)
    return facts


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, such as `lora at batch 4`. Names of repeated runs include the repeat: `(r2)`."""
    cells = cells_of(runs)
    names: dict[str, str] = {}
    for cell, name in zip(cells, cell_names(cells), strict=True):
        for run, repeat in zip(cell.runs, _repeat_names(cell), strict=True):
            names[str(run.record["path"])] = name if len(cell.runs) == 1 else f"{name} ({repeat})"
    return [names[str(run.record["path"])] for run in runs]


def _repeat_names(cell: Cell) -> list[str]:
    """Return short unique names for repeated runs: `r2`, `second-gpu/r2` (with the folder), or the run ids."""
    ends = [run.run_id.rpartition("-")[2] for run in cell.runs]
    within = [f"{run.dir.path.parent.name}/{end}" for run, end in zip(cell.runs, ends, strict=True)]
    return next((names for names in (ends, within) if len(set(names)) == len(names)), [run.run_id for run in cell.runs])


# --- records for the table of runs -----------------------------------------------------------------------------------


def with_axes(runs: Sequence[Run]) -> tuple[list[Record], list[str]]:
    """Add a unique `label` and the settings that vary to the records of runs.

    Returns:
        Records and field names. The records have a field `spec.<key>` for each varying key that needs a column. The
        names of these fields are sorted by importance.
    """
    labels = {"model": [str(run.record["model"]) for run in runs], "dataset": [run.data for run in runs]}
    keys = axes.varying_keys([run.spec for run in runs], labels)
    wider = [run.record | {"label": name} | {PREFIX + key: run.spec.get(key, "") for key in keys}
             for run, name in zip(runs, run_names(runs), strict=True)]  # fmt: skip
    return wider, [PREFIX + key for key in keys]


def merge_repeats(runs: Sequence[Run]) -> list[Run]:
    """Merge each group of repeated runs into its first run.

    Figures are geometric means over the successful runs that were not contended. If some runs have a cold compiler
    cache, the first-step time uses only these runs. The field `runs` is the number of runs in the means."""
    return [replace(group[0], record=_merged([run.record for run in group])) for group in repeats(runs)]


def _merged(group: Sequence[Record]) -> Record:
    ended = [record for record in group if record["state"] == "ok"]
    succeeded = [record for record in ended if not record.get("contention.contended")] or ended[:1]
    first = dict((succeeded or group)[0])
    values = {name: known(succeeded, name) for run in succeeded for name in run if isinstance(run[name], float)}
    figures: Record = {name: geometric_mean(each) or fmean(each) for name, each in values.items()
                       if each != [first[name]] * len(each)}  # fmt: skip
    figures |= {"step_time_s.ci95": None} if len(succeeded) > 1 else {}  # the interval of a single run
    if len(group) > 1 and (cold := [record for record in succeeded if record["first_step_cache"] == "cold"]):
        figures["first_step_s"] = geometric_mean(known(cold, "first_step_s"))
    failed = [record for record in group if record["state"] != "ok"]
    warnings = dict.fromkeys(warning for record in group for warning in record["warnings"])
    if succeeded and failed:
        how = failed[0]["reason"] or failed[0]["state"]
        warnings |= {f"{len(failed)} of {len(group)} repeats failed: {how}": None}
    count = str(len(group)) if len(succeeded) == len(group) else f"{len(succeeded)} of {len(group)}"
    return first | figures | {RUNS: count, "warnings": list(warnings)}


# --- short, unique names of cells and table rows ----------------------------------------------------------------------


def _distinct(group: Sequence[Cell], axis: str) -> list[str]:
    """Return a unique text for each cell in `group`: settings and machine facts that differ, or a run id."""
    ordered = axes.by_importance(dict.fromkeys(key for cell in group for key in cell.runs[0].spec))
    keys = sorted([*[axis] * bool(axis), *ordered, LIMIT, COMMIT, CARD], key=DURATION.__contains__)
    chosen: dict[str, list[str]] = {}
    kinds: list[Any] = [()] * len(group)
    for key in keys:
        facts = [cell.facts.get(key, "unknown") for cell in group]
        if len(set(facts)) > 1:
            values = list(map(short_value, facts))
            more = list(zip(kinds, values, strict=True))
            if len(set(more)) > len(set(kinds)):
                kinds, chosen[key] = more, values
    if len(set(kinds)) < len(group):
        return [cell.runs[0].run_id for cell in group]
    names = axes.headings(chosen)
    return [", ".join(map("{} {}".format, names, values)) for values in zip(*chosen.values(), strict=True)]


def short_value(text: str) -> str:
    """Shorten a value for a table: remove the brackets of lists and cut long texts."""
    return shortened(text.translate(_LIST_MARKS), _MAX_LETTERS)


def cell_names(cells: Sequence[Cell]) -> list[str]:
    """Return a name for each cell, such as `lora at batch 4`. Add model, GPU or data if they differ between cells."""
    rows = [(cell.workload[0].rsplit("/", 1)[-1], cell.name, cell.facts["gpu"], cell.workload[2]) for cell in cells]
    return row_names(rows)


def row_names(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Return a unique name for each table row. A row is (model, name, GPU, data)."""
    models, gpus = ({row[at] for row in rows} for at in (0, 2))
    names = [
        (f"{model}: " if len(models) > 1 and model else "") + name
        + (f" on {'the CPU' if gpu == CPU else canonical_name(gpu)}" if len(gpus) > 1 else "")
        for model, name, gpu, _ in rows
    ]  # fmt: skip
    times = Counter(dict(zip(rows, names, strict=True)).values())  # several rows may show the same cell
    return [f"{name}, {row[3]}" if times[name] > 1 else name for name, row in zip(names, rows, strict=True)]
