"""What a training of so many hours costs."""

from __future__ import annotations

from dataclasses import dataclass

from ftbench.core import units
from ftbench.spec.cost import bills
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
    """The rent where the GPU can be rented, else its share of the purchase with electricity."""
    for bill in bills(price, None, None, watts, seconds / 3600):
        if bill.per_night is not None:
            return Amount(bill.per_night, bill.currency, bill.way)
    return None
