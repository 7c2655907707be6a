"""What an hour of a GPU costs, rented or owned, and what training costs by it, in energy and money: plain arithmetic.

Money keeps the currency it was given in; what is not known is None.
"""

from dataclasses import dataclass

from ftbench.core import units
from ftbench.spec.prices import Owned, Price

HOURS_PER_YEAR = 365.25 * 24


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
    price: Price, samples: float | None, tokens: float | None, watts: float | None, hours: float, gpus: int = 1
) -> list[HourlyCost]:
    """Return what training at this speed (samples and real tokens a second) and power (W) of so many `gpus` together
    costs in each way that has a price; `hours` is a night."""
    rented = price.rent.per_hour * gpus if price.rent else None
    owned, why = _owned(price.owned, None if watts is None else watts / gpus) if price.owned else (None, "")
    ways = [("rent", price.rent, rented, ""), ("owned", price.owned, owned if owned is None else owned * gpus, why)]
    return [
        HourlyCost(
            way, terms.currency, hour,
            None if hour is None else per_1k_samples(hour, samples),
            None if hour is None else per_1m_tokens(hour, tokens),
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
    """Return what a training of so many seconds costs: rent, else the share of the purchase with electricity."""
    costs = hourly_costs(price, None, None, watts, seconds / 3600)
    amounts = (Amount(each.per_night, each.currency, each.way) for each in costs if each.per_night is not None)
    return next(amounts, None)


def running(owned: Owned, watts: float | None) -> float | None:
    """Return electricity for an hour of training; None where it is wanted and the GPU's power is not known."""
    if owned.electricity_per_kwh is None:
        return 0.0
    return None if watts is None else owned.electricity_per_kwh * (watts + owned.host_idle_watts) / 1000


def _owned(owned: Owned, watts: float | None) -> tuple[float | None, str]:
    spent = running(owned, watts)
    if spent is None:
        return None, "the GPU's power was not measured, so what its electricity costs is not known"
    return owned.price / use_hours(owned.lifetime_years, owned.utilisation) + spent, ""


def joules_per_1m_tokens(
    joules_per_1k_samples: float | None, samples_per_s: float | None, tokens_per_s: float | None
) -> float | None:
    """Return the joules per million tokens, by the mean tokens of a sample."""
    if joules_per_1k_samples is None or not samples_per_s or not tokens_per_s:
        return None
    return joules_per_1k_samples / 1e3 * samples_per_s / tokens_per_s * 1e6


def use_hours(lifetime_years: float, utilisation: float) -> float:
    """Return the hours that something works within its life; `utilisation` is the share of all hours."""
    return lifetime_years * HOURS_PER_YEAR * utilisation


def per_1k_samples(per_hour: float, samples_per_s: float | None) -> float | None:
    return None if not samples_per_s else per_hour / 3600 / samples_per_s * 1e3


def per_1m_tokens(per_hour: float, tokens_per_s: float | None) -> float | None:
    return None if not tokens_per_s else per_hour / 3600 / tokens_per_s * 1e6


def break_even_hours(price: float, running_per_hour: float, rent_per_hour: float) -> float | None:
    """Return the hours of use after which buying at `price`, with `running_per_hour` for electricity, has cost as much
    as renting; None where it never does. All three in one currency."""
    saved = rent_per_hour - running_per_hour
    return price / saved if saved > 1e-9 * rent_per_hour else None  # equal but for rounding is equal
