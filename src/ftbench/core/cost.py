"""What training costs in energy and money: plain arithmetic. Money has the unit it was given in; unknown is None."""

from __future__ import annotations

HOURS_PER_YEAR = 365.25 * 24


def joules_per_1m_tokens(
    joules_per_1k_samples: float | None, samples_per_s: float | None, tokens_per_s: float | None
) -> float | None:
    """Return the joules per million tokens, from joules per thousand samples and how many tokens a sample has on
    average."""
    if joules_per_1k_samples is None or not samples_per_s or not tokens_per_s:
        return None
    return joules_per_1k_samples / 1e3 * samples_per_s / tokens_per_s * 1e6


def electricity_per_hour(per_kwh: float, watts: float) -> float:
    """Return the money for an hour at a power in W."""
    return per_kwh * watts / 1000


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
