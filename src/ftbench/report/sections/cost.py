"""Energy and cost per thousand samples and per million real tokens, for rented and for purchased GPUs.

Currencies are not converted. Amounts in different currencies are never added or compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import canonical_name
from ftbench.core.stats import grouped_by
from ftbench.report.data.cells import ENERGY, SAMPLES, TOKENS, Cell, Run, gpu_of
from ftbench.report.data.collect import Record, figure
from ftbench.report.data.groups import runs_of
from ftbench.report.document import Section, formatted, names_of, section
from ftbench.spec.prices import Owned, Prices, Rent, hourly_costs

WATTS, IDLE = "energy.mean_watts", "energy.idle_watts"
_AMOUNTS = ("currency", "per_hour", "per_1k_samples", "per_1m_real_tokens", "per_night", "date", "source")
Figure = Callable[[str], float | None]


def _watts(figure: Figure) -> float | None:
    """Return the mean power of training in watts: joules per 1,000 samples / 1,000 * samples per second.

    If there is no energy counter, use the driver's power readings. These readings lag by a second or more.
    """
    joules, samples = figure(ENERGY), figure(SAMPLES)
    return joules / 1000 * samples if joules and samples else figure(WATTS)


# --- the records -----------------------------------------------------------------------------------------------------


def with_costs(records: Sequence[Record], prices: Prices, hours: float) -> list[Record]:
    """Return the records with added costs: `cost.rent.*` and `cost.owned.*`, None for failed and contended runs."""
    costs = [_costs_of_run(run, prices, hours) for run in runs_of(records)]
    empty = dict.fromkeys(name for amounts in costs for name in amounts)
    return [record | empty | amounts for record, amounts in zip(records, costs, strict=True)]


def _costs_of_run(run: Run, prices: Prices, hours: float) -> Record:
    gpu, gpus = gpu_of(run.record), int(run.spec.get("launch.gpus", "1"))
    ways = _costs(partial(figure, run.record), gpu, gpus, prices, hours) if run.valid else ()
    return {f"cost.{way['way']}.{name}": way[name] for way in ways for name in _AMOUNTS}


def _costs(figure: Figure, gpu: str, gpus: int, prices: Prices, hours: float) -> Iterator[dict[str, Any]]:
    """Yield the costs on rented GPUs and on owned GPUs. `figure` returns a figure of the run or cell by name."""
    if (price := prices.of(gpu)) is None:
        return
    yield from map(asdict, hourly_costs(price, figure(SAMPLES), figure(TOKENS), _watts(figure), hours, gpus))


# --- the sections ----------------------------------------------------------------------------------------------------


def energy(cells: Sequence[Cell]) -> Section | None:
    """Return the section with joules per 1,000 samples and per 1M real tokens, or None if no run measured energy."""
    records = [
        names_of(cell) | {
            "joules_per_1k_samples": joules,
            "joules_per_1m_real_tokens": cell.figure("energy.joules_per_1m_real_tokens"),
            "mean_watts": _watts(cell.figure), "idle_watts": cell.figure(IDLE),
        }
        for cell in cells if (joules := cell.figure(ENERGY)) is not None
    ]  # fmt: skip
    names = {"J/1k samples": "joules_per_1k_samples", "J/1M tokens": "joules_per_1m_real_tokens",
             "mean W": "mean_watts", "idle W": "idle_watts"}  # fmt: skip
    columns = {heading: formatted(name, units.count) for heading, name in names.items()}
    words = ("GPU only, from the driver's energy counter over the steady window. Includes idle power, which has a "
             "column if it was measured before the run. Tokens are real tokens.",)  # fmt: skip
    return section("energy", "Energy (GPU only)", records, columns, words)


def money(cells: Sequence[Cell], prices: Prices, hours: float) -> Section | None:
    """Return the section with the costs of each recipe on rented and on owned GPUs. It has only notes if no GPU has a
    price, and is None if there are no cells."""
    records = [record for cell in cells for record in _records(cell, prices, hours)]
    amounts = {"1 h": "per_hour", "1k samples": "per_1k_samples", "1M tokens": "per_1m_real_tokens",
               f"{hours:g} h": "per_night"}  # fmt: skip
    columns = {"way": formatted("way")} | {
        heading: lambda record, name=name: units.money(record[name], record["currency"])
        for heading, name in amounts.items()
    }
    cheapest = _cheapest([record for cell in cells if cell.measured for record in _records(cell, prices, hours)])
    words = ("All GPUs of a run at its steady speed. Tokens are real tokens; samples are real tokens divided by the "
             "mean length of the data.", *cheapest)  # fmt: skip
    notes = _notes(cells, prices, records)
    known = section("cost", "Cost", records, columns, words, text=("way",), notes=notes)
    return known or (Section("cost", "Cost", paragraphs=notes) if notes else None)


def _records(cell: Cell, prices: Prices, hours: float) -> Iterator[dict[str, Any]]:
    if cell.valid:
        for cost in _costs(cell.figure, cell.facts["gpu"], cell.gpus, prices, hours):
            yield names_of(cell) | cost


def _cheapest(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield sentences about the cheapest and the most expensive recipe. Recipes are compared within the same model,
    data set, currency and `way` (`rent` or `owned`)."""
    known = (record for record in records if record["per_1k_samples"] is not None)
    groups = grouped_by(known, itemgetter("model", "data", "way", "currency"))
    for (model, data, way, currency), group in groups.items():
        low, high = (pick(group, key=lambda record: record["per_1k_samples"]) for pick in (min, max))
        if low["per_1k_samples"] < high["per_1k_samples"]:
            yield (
                f"{model.rsplit('/', 1)[-1]} on {data}, {way}: 1,000 samples are cheapest with {_named(low)}, "
                f"{units.money(low['per_1k_samples'], currency)}; with {_named(high)} they are "
                f"{units.money(high['per_1k_samples'], currency)}."
            )


def _named(record: Mapping[str, Any]) -> str:
    return f"{record['name']} on {record['gpu']}"


def _notes(cells: Sequence[Cell], prices: Prices, records: Sequence[dict[str, Any]]) -> list[str]:
    notes = []
    for gpu in dict.fromkeys(cell.facts["gpu"] for cell in cells):
        if (price := prices.of(gpu)) is None:
            notes.append(f"{gpu}: no price in {prices.path.name}, so its cost is unknown")
            continue
        notes += [f"{canonical_name(gpu)}, {_terms(terms)}" for terms in (price.rent, price.owned) if terms is not None]
    notes += dict.fromkeys(f"{record['gpu']}: {record['why']}" for record in records if record["why"])
    if len({record["currency"] for record in records}) > 1:
        notes.append("amounts are in the currencies of the price file: they are not converted, added or compared")
    return list(dict.fromkeys(notes))  # two driver names may have the same price


def _terms(terms: Rent | Owned) -> str:
    when = f"{terms.date.isoformat()}, {terms.source}"
    if isinstance(terms, Rent):
        return f"rent: {units.money(terms.per_hour, terms.currency)} per hour ({when})"
    electricity = "electricity not counted"
    if terms.electricity_per_kwh is not None:
        electricity = (
            f"{units.money(terms.electricity_per_kwh, terms.currency)} per kWh for the measured power of the GPU and "
            f"{terms.host_idle_watts:g} W for the rest of the machine"
        )
    return (
        f"owned: {units.money(terms.price, terms.currency)} over {terms.lifetime_years:g} years at "
        f"{units.percent(terms.utilisation, 0)} use, {electricity} ({when})"
    )
