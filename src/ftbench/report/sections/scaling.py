"""Several GPUs: scaling of a recipe, and cost of more GPUs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ftbench.core import units
from ftbench.report.data.axes import STRATEGY
from ftbench.report.data.cells import TOKENS, Cell
from ftbench.report.data.names import recipe_name
from ftbench.report.document import Section
from ftbench.report.sections.rows import Record, field, names_of, section
from ftbench.spec.experiment import Launch
from ftbench.spec.prices import HourlyCost, Prices, hourly_costs

# Keys that may differ within a recipe: work division, duration, measurement.
_DIVISION = ("launch.", "train.batch_size", "train.gradient_accumulation_steps", "train.max_steps", "train.epochs",
            "dataset.samples", "measure.")  # fmt: skip
_WORDS = (
    "Tokens per second of all GPUs. Weak scaling: each GPU has the batch of the single GPU. Strong scaling: all GPUs "
    "share that batch. Both are relative to one GPU with the same recipe times the number of GPUs. Skew is the share "
    "of a step that the mean rank waits for the rank with the most tokens."
)


def sections(cells: Sequence[Cell], prices: Prices | None) -> list[Section | None]:
    """Return the sections on several GPUs. All are None if no run used several."""
    groups = _recipes(cells)
    records = [_record(cell, group) for group in groups for cell in group if cell.valid or not cell.ok]
    return [_scaling(records), _worth(groups, prices)]


def _recipes(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells of each recipe that ran on several GPUs, sorted by the number of GPUs."""
    recipes: dict[Any, list[Cell]] = {}
    for cell in cells:
        key = tuple(sorted((key, text) for key, text in cell.runs[0].spec.items() if not key.startswith(_DIVISION)))
        recipes.setdefault((cell.facts["gpu"], key), []).append(cell)
    several = (group for group in recipes.values() if any(cell.gpus > 1 for cell in group))
    return [sorted(group, key=lambda cell: (cell.gpus, cell.facts.get(STRATEGY, ""))) for group in several]


def _samples(cell: Cell, shares: int = 1) -> int:
    """Return the samples per optimizer step of a number of data-parallel shares."""
    each = (int(cell.facts.get(f"train.{name}", "1")) for name in ("batch_size", "gradient_accumulation_steps"))
    return math.prod(each) * shares


def _shares(cell: Cell) -> int:
    """Return the number of data-parallel shares of a step's batch."""
    numbers = {key: cell.facts.get(f"launch.{key}", "") for key in ("tp", "pp")}
    launch: dict[str, Any] = {"gpus": cell.gpus, "strategy": cell.facts.get(STRATEGY, "none")}
    launch |= {key: int(text) if text.isdecimal() else None for key, text in numbers.items()}
    return Launch.model_construct(**launch).shares


def _single(cell: Cell, group: Sequence[Cell], samples: int) -> Cell | None:
    """Return the single-GPU cell with this many samples per step, preferably with the same batch size."""
    cells = [other for other in group if other.gpus == 1 and other.figure(TOKENS) and _samples(other) == samples]
    batch = "train.batch_size"
    return max(cells, key=lambda other: other.facts.get(batch) == cell.facts.get(batch), default=None)


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
        "strong": _efficiency(cell, _single(cell, group, _samples(cell, _shares(cell)))),
        "lowest_gb": low, "highest_gb": high or cell.figure("memory_gb.allocated_peak"),
        "token_skew": _figure(cell, "ranks.token_skew"), "bubble": _figure(cell, "ranks.bubble"), "state": cell.state,
    }  # fmt: skip


def _figure(cell: Cell, name: str) -> float | None:
    return next(iter(cell.values(name)), None)


def _scaling(records: Sequence[Record]) -> Section | None:
    columns = {
        "GPUs": field("gpus"), "strategy": field("strategy"), "tokens/s": field("tokens_per_s", units.rate),
        "per GPU": field("tokens_per_s_per_gpu", units.rate), "weak": field("weak", units.percent),
        "strong": field("strong", units.percent), "GiB per GPU": _between, "skew": field("token_skew", units.percent),
        "state": field("state"),
    }  # fmt: skip
    if any(record["bubble"] is not None for record in records):
        columns |= {"bubble": field("bubble", units.percent)}
    if any(record["offload"] != "none" for record in records):
        columns = {"offload": field("offload")} | columns
    return section("scaling", "Several GPUs", records, columns, (_WORDS,), text=("strategy", "offload"))


def _between(record: Record) -> str:
    low, high = (units.gibibytes(record[name]) for name in ("lowest_gb", "highest_gb"))
    return f"{low} to {high}" if low and low != high else high


# --- cost of more GPUs ------------------------------------------------------------------------------------------------


def _worth(groups: Sequence[Sequence[Cell]], prices: Prices | None) -> Section | None:
    """Return a sentence per cell on the speed and cost of its GPUs compared with one."""
    sentences = [text for group in groups for cell in group if cell.gpus > 1
                 for text in _worths(cell, group, prices)]  # fmt: skip
    return Section("worth", "Are more GPUs worth it?", None, sentences) if sentences else None


def _worths(cell: Cell, group: Sequence[Cell], prices: Prices | None) -> Iterator[str]:
    gpus, rate = cell.gpus, cell.figure(TOKENS)
    single = _single(cell, group, _samples(cell)) or _single(cell, group, _samples(cell, _shares(cell)))
    name = f"{gpus} GPUs ({cell.facts.get(STRATEGY)}), {recipe_name(cell.facts)} at batch {cell.batch}"
    failed = [other for other in group if other.gpus == 1 and not other.ok]
    if single is None or not rate:
        if rate and failed:
            yield f"{name}: one GPU cannot train it ({failed[0].state})."
        return
    base = single.figure(TOKENS) or 0.0
    faster, dearer = rate / base, gpus * base / rate
    text = f"{name}: {faster:.2f} times as fast as one, so a token costs {dearer:.2f} times as much GPU time"
    amounts = "; ".join(_amounts(cell, single, prices)) if prices else ""
    time = f"a day on one becomes {units.seconds(86_400 / faster)}"
    verdict = "worth it if time matters" if faster > 1.05 else "not worth it: it saves no time"
    yield f"{text}{f' ({amounts})' if amounts else ''}; {time}: {verdict}."


def _amounts(cell: Cell, single: Cell, prices: Prices) -> Iterator[str]:
    """Yield the cost of a million tokens on several GPUs and on one."""
    price = prices.of(cell.facts["gpu"])
    for several, alone in zip(*(_hourly(each, price) if price else () for each in (cell, single)), strict=True):
        if several.per_1m_real_tokens and alone.per_1m_real_tokens:
            costs = (units.money(each.per_1m_real_tokens, each.currency) for each in (several, alone))
            yield f"{several.way}: {' instead of '.join(costs)} for 1M tokens"


def _hourly(cell: Cell, price: Any) -> list[HourlyCost]:
    watts = cell.figure("energy.mean_watts")
    return hourly_costs(price, None, cell.figure(TOKENS), watts, 1.0, cell.gpus)
