"""What an hour of a GPU costs, rented or owned, and what training costs by it. Pure; amounts keep their currency."""

from __future__ import annotations

from dataclasses import dataclass

from ftbench.core import cost, units
from ftbench.spec.prices import Owned, Price


@dataclass(frozen=True, slots=True)
class HourlyCost:
    """An hour of a GPU in one way of having it, with what follows from how fast it trains. Amounts in `currency`;
    None is not known. `why` says what the hour lacks."""

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
    price: Price, samples: float | None, tokens: float | None, watts: float | None, hours: float
) -> list[HourlyCost]:
    """Return what training at this speed (samples and real tokens a second) and power (W, of the GPU) costs in each way
    that has a price; `hours` is a night."""
    ways = [("rent", price.rent, price.rent.per_hour if price.rent else None, ""),
            ("owned", price.owned, *(_owned(price.owned, watts) if price.owned else (None, "")))]  # fmt: skip
    return [
        HourlyCost(
            way, terms.currency, hour,
            None if hour is None else cost.per_1k_samples(hour, samples),
            None if hour is None else cost.per_1m_tokens(hour, tokens),
            None if hour is None else hour * hours,
            terms.date.isoformat(), terms.source, why,
        )
        for way, terms, hour, why in ways if terms is not None
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Amount:
    """Money in one currency, and the way of having the GPU that it is for: rent or owned."""

    value: float
    currency: str
    way: str

    def __str__(self) -> str:
        return units.money(self.value, self.currency)


def amount(price: Price, seconds: float, watts: float) -> Amount | None:
    """Return what a training of so many seconds costs: the rent where the GPU can be rented, else its share of the
    purchase with electricity."""
    costs = hourly_costs(price, None, None, watts, seconds / 3600)
    amounts = (Amount(each.per_night, each.currency, each.way) for each in costs if each.per_night is not None)
    return next(amounts, None)


def running(owned: Owned, watts: float | None) -> float | None:
    """Return electricity for an hour of training; None where it is wanted and the GPU's power is not known."""
    if owned.electricity_per_kwh is None:
        return 0.0
    return (
        None if watts is None else cost.electricity_per_hour(owned.electricity_per_kwh, watts + owned.host_idle_watts)
    )


def _owned(owned: Owned, watts: float | None) -> tuple[float | None, str]:
    spent = running(owned, watts)
    if spent is None:
        return None, "the GPU's power was not measured, so what its electricity costs is not known"
    return owned.price / cost.use_hours(owned.lifetime_years, owned.utilisation) + spent, ""
