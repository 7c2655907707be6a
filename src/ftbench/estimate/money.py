"""What a training of so many hours costs."""

from __future__ import annotations

from dataclasses import dataclass

from ftbench.core import units
from ftbench.spec.cost import hourly_costs
from ftbench.spec.prices import Price


@dataclass(frozen=True, slots=True)
class Amount:
    """Money in one currency, and the way of having the GPU that it is for: rent or owned."""

    value: float
    currency: str
    way: str

    def __str__(self) -> str:
        return units.money(self.value, self.currency)


def amount(price: Price, seconds: float, watts: float) -> Amount | None:
    """Return the rent where the GPU can be rented, else its share of the purchase with electricity."""
    for cost in hourly_costs(price, None, None, watts, seconds / 3600):
        if cost.per_night is not None:
            return Amount(cost.per_night, cost.currency, cost.way)
    return None
