"""The sections about speed: samples per night, and the scaling of a recipe over several GPUs."""

import math
from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.report.data.axes import FRAMEWORK, SETTINGS, STRATEGY, recipe_name
from ftbench.report.data.cells import BATCH, SAMPLES, TOKENS, Cell
from ftbench.report.data.collect import Record, figure
from ftbench.report.data.facts import COMMIT, LIMIT
from ftbench.report.document import Section, formatted, names_of, section
from ftbench.spec.experiment import Launch

# The figures of the time before the first steady step, which every run has.
_BEFORE = ("time_to_steady_s", *(f"phases_s.{name}" for name in ("import", "prepare_data", "load", "setup")))
# Keys that may differ within a recipe: work division, duration, measurement.
_DIVISION = ("launch.", "train.batch_size", "train.gradient_accumulation_steps", "train.max_steps", "train.epochs",
            "dataset.samples", "measure.")  # fmt: skip
_WORDS = (
    "tokens/s is the sum over all GPUs. 100 % scaling is the speed of one GPU with this recipe, times the number of "
    "GPUs. With weak scaling, each GPU trains as large a batch as the single GPU. With strong scaling, all GPUs share "
    "that batch. Skew is the share of a step that an average GPU waits for the GPU with the most tokens."
)


# --- a night ---------------------------------------------------------------------------------------------------------


def night(cells: Sequence[Cell], hours: float = 8.0) -> Section | None:
    """Return the section with samples per hour after warm-up, and samples in `hours`.

    The start of the process and warm-up are part of `hours`, but samples of this time do not count. The number of
    samples is real tokens / mean sample length.
    """
    records = []
    for cell in cells:
        if (rate := cell.figure(SAMPLES)) is None:
            continue
        starts = [sum(figure(run.record, name) or 0.0 for name in _BEFORE) for run in cell.valid]
        start, tokens = max(starts, default=0.0), cell.figure(TOKENS)
        left = max(0.0, hours * 3600 - start)
        records.append({
            **names_of(cell), "samples_per_hour": rate * 3600, "start_s": start or None, "hours": hours,
            "samples": rate * left, "real_tokens": None if tokens is None else tokens * left,
        })  # fmt: skip
    columns = {
        "samples/h": formatted("samples_per_hour", units.rate), "start": formatted("start_s", units.seconds),
        f"samples in {hours:g} h": formatted("samples", units.count),
        f"tokens in {hours:g} h": formatted("real_tokens", lambda tokens: f"{tokens / 1e6:,.1f} M" if tokens else ""),
    }  # fmt: skip
    words = ("Samples are real tokens divided by the mean length of the data.",)
    return section("night", f"Samples per hour and in {hours:g} hours", records, columns, words)


# --- several GPUs ----------------------------------------------------------------------------------------------------


def scaling(cells: Sequence[Cell]) -> Section | None:
    """Return the section with the scaling of each recipe, or None if no run used several GPUs."""
    records = [_record(cell, group) for group in _recipes(cells) for cell in group if cell.valid or not cell.ok]
    columns = {
        "GPUs": formatted("gpus"), "strategy": formatted("strategy"), "tokens/s": formatted("tokens_per_s", units.rate),
        "per GPU": formatted("tokens_per_s_per_gpu", units.rate), "weak": formatted("weak", units.percent),
        "strong": formatted("strong", units.percent), "GiB per GPU": _between,
        "skew": formatted("token_skew", units.percent), "state": formatted("state"),
    }  # fmt: skip
    if any(record["bubble"] is not None for record in records):
        columns |= {"bubble": formatted("bubble", units.percent)}
    if any(record["offload"] != "none" for record in records):
        columns = {"offload": formatted("offload")} | columns
    return section("scaling", "Several GPUs", records, columns, (_WORDS,), text=("strategy", "offload"))


def _recipes(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group runs of one GPU model, power limit and commit by recipe. Leave out recipes that used only one GPU."""
    recipes: dict[Any, list[Cell]] = {}
    for cell in cells:
        key = sorted((key, text) for key, text in cell.runs[0].spec.items() if not key.startswith(_DIVISION))
        recipes.setdefault((*map(cell.facts.get, ("gpu", LIMIT, COMMIT, FRAMEWORK, SETTINGS)), *key), []).append(cell)
    several = (group for group in recipes.values() if any(cell.gpus > 1 for cell in group))
    return [sorted(group, key=lambda cell: (cell.gpus, cell.facts.get(STRATEGY, ""))) for group in several]


def _samples(cell: Cell, groups: int = 1) -> int:
    """Return samples per optimizer step: batch size * accumulation steps * data-parallel groups (`groups`)."""
    sizes = (int(cell.facts.get(f"train.{name}", "1")) for name in ("batch_size", "gradient_accumulation_steps"))
    return math.prod(sizes) * groups


def _data_parallel_size(cell: Cell) -> int:
    """Return the number of data-parallel groups. Each group trains on a separate batch."""
    numbers = {key: cell.facts.get(f"launch.{key}", "") for key in ("tp", "pp")}
    launch: dict[str, Any] = {"gpus": cell.gpus, "strategy": cell.facts.get(STRATEGY, "none")}
    launch |= {key: int(text) if text.isdecimal() else None for key, text in numbers.items()}
    return Launch.model_construct(**launch).data_parallel_size


def _single(cell: Cell, group: Sequence[Cell], samples: int) -> Cell | None:
    """Return a one-GPU cell with `samples` samples per step, or None. Prefer a cell with the batch size of `cell`."""
    cells = [other for other in group if other.gpus == 1 and other.figure(TOKENS) and _samples(other) == samples]
    return max(cells, key=lambda other: other.facts.get(BATCH) == cell.facts.get(BATCH), default=None)


def _efficiency(cell: Cell, single: Cell | None) -> float | None:
    rate, base = cell.figure(TOKENS), single.figure(TOKENS) if single else None
    return rate / base / cell.gpus if rate and base and cell.gpus > 1 else None


def _record(cell: Cell, group: Sequence[Cell]) -> Record:
    gpus, rate = cell.gpus, cell.figure(TOKENS)
    low, high = (_figure(cell, f"ranks.spread.peak_memory_gb.{end}") for end in ("lowest", "highest"))
    return names_of(cell) | {
        "recipe": recipe_name(cell.facts), "gpus": gpus, "strategy": cell.facts.get(STRATEGY, "none"),
        "offload": cell.facts.get("launch.offload", "none"),
        "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / gpus if rate else None,
        "weak": _efficiency(cell, _single(cell, group, _samples(cell))),
        "strong": _efficiency(cell, _single(cell, group, _samples(cell, _data_parallel_size(cell)))),
        "lowest_gb": low, "highest_gb": high or cell.figure("memory_gb.allocated_peak"),
        "token_skew": _figure(cell, "ranks.token_skew"), "bubble": _figure(cell, "ranks.bubble"), "state": cell.state,
    }  # fmt: skip


def _figure(cell: Cell, name: str) -> float | None:
    return next(iter(cell.values(name)), None)


def _between(record: Record) -> str:
    low, high = (units.gibibytes(record[name]) for name in ("lowest_gb", "highest_gb"))
    return f"{low} to {high}" if low and low != high else high
