"""Convert numbers with units to text. The functions return an empty string for None."""

import re
from collections.abc import Sequence
from typing import Any

GIB, JOULES_PER_KWH = 2**30, 3.6e6
NIGHT_H = 8.0  # hours of a night
_SHARE = re.compile(r"(?<=\d)%")
_ONE = re.compile(r"(?<![\d.,])1 ((?:steady |other )?(?:step|graph|time|flush|process))(?:es|s)\b( were)?")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s)?", re.ASCII)


def seconds(value: float | None) -> str:
    """Return a duration as text in a suitable unit: `8.1 ms`, `0.92 s`, `12.3 s`, `4 min 05 s`, `2 h 10 min`, `39.6
    days`."""
    if value is None:
        return ""
    if value < 0.0995:
        return f"{value * 1000:.3g} ms"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 100 else f"{value / 86_400:,.1f} days"


def parse_seconds(text: str) -> float | None:
    """Convert `8h`, `90m`, `1h30m` or `45s` to seconds. Return None for any other text and for zero."""
    match = _DURATION.fullmatch(text.replace(" ", "").lower())
    total = sum(float(n) * unit for n, unit in zip(match.groups(), (3600, 60, 1), strict=True) if n) if match else 0.0
    return total if 0 < total < float("inf") else None


def gibibytes(value: float | None) -> str:
    """Return a number of GiB as text: `0.123`, `7.60`, `77.3`."""
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def count(value: float | None) -> str:
    """Round a number to an integer and return it with thousands separators: `12,345`."""
    return "" if value is None else f"{round(value):,}"


def some(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: `1 run`, `3 processes`, `1,200 files`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def listed(texts: Sequence[str], most: int) -> str:
    """Join the first `most` texts and add the number of the others: `a, b and 3 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def rate(value: float | None) -> str:
    """Return a rate as text: an integer from 10 on, three significant digits below 10."""
    if value is None:
        return ""
    return f"{round(value):,}" if value >= 10 else f"{value:.3g}"


def tflops(value: float | None) -> str:
    """Return a number of TFLOP/s as text: `0.437`, `67.1`, `1,420`."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float | None, currency: str) -> str:
    """Return an amount as text: `0.0412 USD`, `1,600,000 JPY`. Amounts below 1,000 have three significant digits."""
    if value is None:
        return ""
    if value >= 999.5:
        return f"{round(value):,} {currency}"
    return f"{value:#.3g} {currency}".replace(". ", " ")


def percent(value: float | None, digits: int = 1) -> str:
    """Return a fraction in percent: 0.423 gives `42.3 %`."""
    return "" if value is None else f"{value * 100:.{digits}f} %"


def change(value: float | None, digits: int = 1) -> str:
    """Return a relative change in percent: 0.042 gives `+4.2 %`, and -0.12 gives `-12.0 %`."""
    if value is None:
        return ""
    return f"{value * 100:+,.0f} %" if abs(value) >= 10 else f"{value * 100:+,.{digits}f} %"


def tidy(text: str) -> str:
    """Return a sentence with `1 step` instead of `1 steps`, and with `5 %` instead of `5%`."""
    return _ONE.sub(lambda match: f"1 {match[1]}" + " was" * bool(match[2]), _SHARE.sub(" %", text))


def parameters(value: int | None) -> str:
    """Return a number of parameters as text: `8.19 B`, `21.8 M`."""
    if value is None:
        return ""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return str(value)


def optimizations_on(section: dict[str, Any]) -> list[str]:
    """Return the names of the optimizations that are on, for example `compile` and `fp8 tensorwise`."""
    return [
        name if value is True else f"{name} {value}"
        for name, value in section.items()
        if value not in (False, "off", "auto")
    ]
