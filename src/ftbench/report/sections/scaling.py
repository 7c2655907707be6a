"""Several GPUs: how a recipe scales with them, what each of them holds, and whether more are worth their money."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftbench.core import units
from ftbench.core.allocations import CATEGORIES
from ftbench.report.data.axes import STRATEGY
from ftbench.report.data.collect import figure
from ftbench.report.data.groups import TOKENS, Cell, Run
from ftbench.report.data.ways import recipe_name
from ftbench.report.render.document import Section
from ftbench.report.sections.rows import Record, field, names_of, section
from ftbench.spec.experiment import Launch
from ftbench.spec.prices import HourlyCost, Prices, hourly_costs
from ftbench.store.rundir import MEMORY, read_json

# What a recipe is not: how its work is divided, how long it lasts, what is measured beside it.
_DIVIDED = ("launch.", "train.batch_size", "train.gradient_accumulation_steps", "train.max_steps", "train.epochs",
            "dataset.samples", "measure.")  # fmt: skip
_TIERS = {"allocated": "tensors", "reserved": "pool beyond them", "device": "driver, NCCL and others"}
_WORDS = (
    "Tokens a second of all GPUs. Weak: each GPU has the batch that one had; strong: all together have it. Both in % "
    "of so many times one GPU running the same recipe. Skew is the share of a step in which the mean rank waits for "
    "the one with the most tokens."
)


def sections(cells: Sequence[Cell], profiled: Sequence[Cell], prices: Prices | None) -> list[Section | None]:
    """Return the sections on several GPUs; none where no run had several."""
    groups = _recipes(cells)
    records = [_record(cell, group) for group in groups for cell in group]
    alone = [[quiet for cell in group if (quiet := cell.undisturbed())] for group in groups]  # no speed beside others
    return [_scaling(records), _worth(alone, prices), _memory([*cells, *profiled])]


def _recipes(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells of each recipe that some run trained on several GPUs, by their number."""
    recipes: dict[Any, list[Cell]] = {}
    for cell in cells:
        key = tuple(sorted((key, text) for key, text in cell.runs[0].spec.items() if not key.startswith(_DIVIDED)))
        recipes.setdefault((cell.facts["gpu"], key), []).append(cell)
    several = (group for group in recipes.values() if any(cell.gpus > 1 for cell in group))
    return [sorted(group, key=lambda cell: (cell.gpus, cell.facts.get(STRATEGY, ""))) for group in several]


def _samples(cell: Cell, shares: int = 1) -> int:
    """Return the samples of an optimizer step of one share of the batch, or of so many."""
    each = (int(cell.facts.get(f"train.{name}", "1")) for name in ("batch_size", "gradient_accumulation_steps"))
    return math.prod(each) * shares


def _shares(cell: Cell) -> int:
    """Return the number of data-parallel shares of a step's batch."""
    tp = cell.facts.get("launch.tp", "")
    launch: dict[str, Any] = {"gpus": cell.gpus, "strategy": cell.facts.get(STRATEGY, "none")}
    return Launch.model_construct(**launch, tp=int(tp) if tp.isdecimal() else None).shares


def _alone(cell: Cell, group: Sequence[Cell], samples: int) -> Cell | None:
    """Return the cell on one GPU whose step has so many samples; of several the one with the same batch size."""
    alone = [other for other in group if other.gpus == 1 and other.figure(TOKENS) and _samples(other) == samples]
    batch = "train.batch_size"
    return max(alone, key=lambda other: other.facts.get(batch) == cell.facts.get(batch), default=None)


def _efficiency(cell: Cell, alone: Cell | None) -> float | None:
    rate, single = cell.figure(TOKENS), alone.figure(TOKENS) if alone else None
    return rate / single / cell.gpus if rate and single and cell.gpus > 1 else None


def _record(cell: Cell, group: Sequence[Cell]) -> Record:
    gpus, rate = cell.gpus, cell.figure(TOKENS)
    low, high = (_figure(cell, f"ranks.spread.peak_memory_gb.{end}") for end in ("lowest", "highest"))
    return names_of(cell) | {
        "recipe": recipe_name(cell.facts), "gpus": gpus, "strategy": cell.facts.get(STRATEGY, "none"),
        "offload": cell.facts.get("launch.offload", "none"),
        "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / gpus if rate else None,
        "weak": _efficiency(cell, _alone(cell, group, _samples(cell))),
        "strong": _efficiency(cell, _alone(cell, group, _samples(cell, _shares(cell)))),
        "lowest_gb": low, "highest_gb": high or cell.figure("memory_gb.allocated_peak"),
        "token_skew": _figure(cell, "ranks.token_skew"), "state": cell.state,
    }  # fmt: skip


def _figure(cell: Cell, name: str) -> float | None:
    return next(iter(cell.values(name)), None)


def _scaling(records: Sequence[Record]) -> Section | None:
    columns = {
        "GPUs": field("gpus"), "strategy": field("strategy"), "tokens/s": field("tokens_per_s", units.rate),
        "a GPU": field("tokens_per_s_per_gpu", units.rate), "weak": field("weak", units.percent),
        "strong": field("strong", units.percent), "GiB a GPU": _between, "skew": field("token_skew", units.percent),
        "state": field("state"),
    }  # fmt: skip
    if any(record["offload"] != "none" for record in records):
        columns = {"offload": field("offload")} | columns
    own = section("scaling", "Several GPUs", records, columns, (_WORDS,), text=("strategy", "offload"))
    return own and replace(own, curves=_curves([record for record in records if record["tokens_per_s"]]))


def _between(record: Record) -> str:
    low, high = (units.gibibytes(record[name]) for name in ("lowest_gb", "highest_gb"))
    return f"{low} to {high}" if low and low != high else high


def _curves(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each recipe, batch and strategy, which begin with one GPU of that batch, where it ran."""
    lines: dict[str, list[tuple[int, float]]] = {}
    alone: dict[str, list[tuple[int, float]]] = {}
    for record in sorted(records, key=lambda record: record["gpus"] > 1):
        key, point = f"{record['recipe']}, batch {record['batch']}", (record["gpus"], record["tokens_per_s"])
        if record["gpus"] > 1:
            lines.setdefault(f"{key}: {record['strategy']}", [*alone.get(key, [])]).append(point)
        else:
            alone.setdefault(key, [point])
    return lines


# --- is it worth it ---------------------------------------------------------------------------------------------------


def _worth(groups: Sequence[Sequence[Cell]], prices: Prices | None) -> Section | None:
    """Return what more GPUs bring for their money, a sentence for each way of having them."""
    sentences = [text for group in groups for cell in group if cell.gpus > 1
                 for text in _worths(cell, group, prices)]  # fmt: skip
    return Section("worth", "Are more GPUs worth it?", None, sentences) if sentences else None


def _worths(cell: Cell, group: Sequence[Cell], prices: Prices | None) -> Iterator[str]:
    gpus, rate = cell.gpus, cell.figure(TOKENS)
    alone = _alone(cell, group, _samples(cell)) or _alone(cell, group, _samples(cell, _shares(cell)))
    name = f"{gpus} GPUs ({cell.facts.get(STRATEGY)}), {recipe_name(cell.facts)} at batch {cell.batch}"
    failed = [other for other in group if other.gpus == 1 and not other.ok]
    if alone is None or not rate:
        if rate and failed:
            yield f"{name}: one GPU does not train it ({failed[0].state}), so there is no choice."
        return
    base = alone.figure(TOKENS) or 0.0
    faster, dearer = rate / base, gpus * base / rate
    text = f"{name}: {faster:.2f} times as fast as one, so a token costs {dearer:.2f} times as much GPU time"
    amounts = "; ".join(_amounts(cell, alone, prices)) if prices else ""
    time = f"what takes a day on one takes {units.seconds(86_400 / faster)}"
    verdict = "worth it wherever time counts" if faster > 1.05 else "not worth it: no time is saved"
    yield f"{text}{f' ({amounts})' if amounts else ''}; {time}: {verdict}."


def _amounts(cell: Cell, alone: Cell, prices: Prices) -> Iterator[str]:
    """Yield what a million tokens cost on several GPUs and on one."""
    price = prices.of(cell.facts["gpu"])
    for several, single in zip(*(_hourly(each, price) if price else () for each in (cell, alone)), strict=True):
        if several.per_1m_real_tokens and single.per_1m_real_tokens:
            costs = (units.money(each.per_1m_real_tokens, each.currency) for each in (several, single))
            yield f"{several.way}: {' instead of '.join(costs)} for 1M tokens"


def _hourly(cell: Cell, price: Any) -> list[HourlyCost]:
    watts = cell.figure("energy.mean_watts")
    return hourly_costs(price, None, cell.figure(TOKENS), watts, 1.0, cell.gpus)


# --- what each holds --------------------------------------------------------------------------------------------------


def _memory(cells: Sequence[Cell]) -> Section | None:
    """Return what memory of each rank is for: of a profile by what tensors are for, else tensors, the allocator's pool
    beyond them, and what the driver counts beside."""
    records = [
        names_of(cell) | {"rank": rank, "parts": parts}
        for cell in cells if cell.gpus > 1 and cell.ok
        for rank, parts in enumerate(_profiled(cell.ok[0]) or _tiers(cell.ok[0]))
    ]  # fmt: skip
    kinds = [kind for kind in (*CATEGORIES, *_TIERS.values()) if any(record["parts"].get(kind) for record in records)]
    columns: dict[str, Callable[[Record], str]] = {
        "rank": field("rank"),
        "GiB": lambda r: _gb(sum(r["parts"].values())),
    }
    columns |= {kind: field("parts", _gb, kind) for kind in kinds}
    words = ("GiB of each rank at its highest: of a profiled run by what the tensors are for.",)
    return section("memory_by_rank", "Memory of each GPU", records, columns, words)


def _gb(value: float | None) -> str:
    return units.gibibytes(value) if value else ""


def _profiled(run: Run) -> list[dict[str, float]]:
    ranks = (
        read_json(run.dir.of_rank(rank).profile / MEMORY).get("peak")
        for rank in range(int(figure(run.record, "ranks.count") or 1))
    )
    return [{kind: peak[kind] for kind in CATEGORIES} for peak in ranks if peak]


def _tiers(run: Run) -> list[dict[str, float]]:
    """Return of each rank what each tier holds beyond the one within it."""
    ranks = (run.record.get("ranks.memory_gb") or [])[: int(figure(run.record, "ranks.count") or 1)]
    result = []
    for rank in ranks:
        within, parts = 0.0, {}
        for tier, word in _TIERS.items():
            if (size := rank.get(tier)) is not None:
                parts[word], within = max(0.0, size - within), max(within, size)
        result.append(parts)
    return result
