"""Read a price file, and compute the cost of training per hour, per sample, per token and per night.

Amounts are in the currency of the file. Unknown values are None.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError, model_validator

from ftbench.core import units
from ftbench.core.hardware import canonical_name, gpus
from ftbench.errors import SpecError
from ftbench.spec.base import Float, Part, nearest
from ftbench.spec.reading import in_file, location, read_yaml

HOURS_PER_YEAR = 365.25 * 24
Currency = Annotated[str, StringConstraints(to_upper=True, pattern="^[A-Za-z]{3}$")]


class Rent(Part):
    """The price of a GPU that is rented by the hour."""

    per_hour: Float = Field(gt=0)
    currency: Currency
    date: date
    source: str = Field(min_length=1)


class Owned(Part):
    """The price of a bought GPU, including its share of the machine.

    Electricity is counted only for training hours. The power is the measured GPU power plus `host_idle_watts` (the
    GPU's share of the power of the rest of the machine).
    """

    price: Float = Field(gt=0)
    currency: Currency
    lifetime_years: Float = Field(gt=0, le=50)
    utilisation: Float = Field(gt=0, le=1, description="share of all hours in which it trains")
    electricity_per_kwh: Float | None = Field(None, ge=0)
    host_idle_watts: Float = Field(0, ge=0)
    date: date
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Owned:
        if self.host_idle_watts and self.electricity_per_kwh is None:
            raise ValueError("`host_idle_watts` needs `electricity_per_kwh`")
        return self


class Price(Part):
    """The cost of one GPU: rented, owned, or both."""

    rent: Rent | None = None
    owned: Owned | None = None

    @model_validator(mode="after")
    def _check(self) -> Price:
        if self.rent is None and self.owned is None:
            raise ValueError("needs `rent:`, `owned:` or both")
        return self


@dataclass(frozen=True, slots=True)
class Prices:
    """The content of a price file. `by_gpu` has the price of each GPU by canonical name."""

    path: Path
    by_gpu: dict[str, Price]

    def of(self, gpu: str | None) -> Price | None:
        """Return the price of a GPU, or None. `gpu` is the name that the driver reports."""
        return None if gpu is None else self.by_gpu.get(canonical_name(gpu))


def load_prices(path: Path, used: Collection[str] = ()) -> Prices:
    """Return the prices in a YAML file. `used` are the names of the GPUs in the runs. Other names must be in the table
    of known GPUs. Raise SpecError with one `file:line: key: problem` for each mistake."""
    problems: list[str] = []
    by_gpu: dict[str, Price] = {}
    names: dict[str, str] = {}
    allowed = {*(gpu.name for gpu in gpus()), *used}
    needs = "a GPU and its price (see configs/prices.yaml)"
    for name, values in read_yaml(path, "a price file", needs).items():
        gpu, where = canonical_name(name), f"{location(path, [name])}: {name}: "
        if gpu in names:
            problems.append(f"{where}is the same GPU as {names[gpu]!r}: keep one of them")
        elif gpu not in allowed:
            hint = nearest(name, allowed) or "; `ftbench list gpus` shows the names"
            problems.append(f"{where}unknown GPU, and not a GPU of these runs{hint}")
        names[gpu] = name
        try:
            by_gpu[gpu] = Price.model_validate(values)
        except ValidationError as error:
            fix = ": write three letters, such as `currency: USD` (see configs/prices.yaml)"
            texts = in_file(error, path, Price, name)
            problems += [text + fix * (".currency: " in text) for text in texts]
    if problems:
        raise SpecError(*problems)
    return Prices(path, by_gpu)


@dataclass(frozen=True, slots=True)
class HourlyCost:
    """The cost of training per hour, per 1,000 samples, per million real tokens, and per night.

    `way` is `rent` or `owned`. Amounts are in `currency`. If `per_hour` is None, `why` is the reason.
    """

    way: str
    currency: str
    per_hour: float | None
    per_1k_samples: float | None
    per_1m_real_tokens: float | None
    per_night: float | None
    date: str
    source: str
    why: str = ""


def hourly_costs(
    price: Price, samples: float | None, tokens: float | None, watts: float | None, hours: float, gpus: int = 1
) -> list[HourlyCost]:
    """Return the cost of training on rented GPUs, on owned GPUs, or both, depending on the terms in `price`.

    `price` is the price of one GPU. `samples` and `tokens` (real tokens) are per second. These rates and the power in
    `watts` are sums over all GPUs. `hours` is the length of a night."""
    rented = price.rent.per_hour * gpus if price.rent else None
    owned, why = _owned(price.owned, None if watts is None else watts / gpus) if price.owned else (None, "")
    ways = [("rent", price.rent, rented, ""), ("owned", price.owned, owned if owned is None else owned * gpus, why)]
    return [
        HourlyCost(
            way, terms.currency, hour, _per(hour, samples, 1e3), _per(hour, tokens, 1e6),
            None if hour is None else hour * hours, terms.date.isoformat(), terms.source, why,
        )
        for way, terms, hour, why in ways if terms is not None
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of money for training. `way` is `rent` or `owned`."""

    value: float
    currency: str
    way: str

    def __str__(self) -> str:
        return units.money(self.value, self.currency)


def amount(price: Price, seconds: float, watts: float) -> Amount | None:
    """Return the cost of `seconds` of training on one GPU: the rent or, without a rent, the cost of an owned GPU."""
    costs = hourly_costs(price, None, None, watts, seconds / 3600)
    amounts = (Amount(each.per_night, each.currency, each.way) for each in costs if each.per_night is not None)
    return next(amounts, None)


def _owned(owned: Owned, watts: float | None) -> tuple[float | None, str]:
    """Return the cost of an owned GPU per hour of training, or None and a reason if its power is unknown."""
    electricity = 0.0
    if owned.electricity_per_kwh is not None:
        if watts is None:
            return None, "the cost of electricity is unknown, because the GPU power was not measured"
        electricity = owned.electricity_per_kwh * (watts + owned.host_idle_watts) / 1000
    return owned.price / (owned.lifetime_years * HOURS_PER_YEAR * owned.utilisation) + electricity, ""


def _per(per_hour: float | None, rate: float | None, count: float) -> float | None:
    """Return the cost of `count` samples or tokens at `rate` per second. Return None if a value is unknown."""
    return None if per_hour is None or not rate else per_hour / 3600 / rate * count
