"""A price file: what an hour of each GPU costs, rented or owned, with date and source; every mistake a sentence."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ftbench.core.hardware import canonical_name, gpus
from ftbench.errors import SpecError
from ftbench.spec.base import Float, Part, nearest
from ftbench.spec.mistakes import in_file
from ftbench.spec.reading import location, read_yaml


def _currency(value: str) -> str:
    if not re.fullmatch(r"[A-Z]{3}", value):
        raise ValueError("must be the three capital letters of a currency, for example USD")
    return value


Currency = Annotated[str, AfterValidator(_currency)]


class Rent(Part):
    """One GPU by the hour."""

    per_hour: Float = Field(gt=0)
    currency: Currency
    date: date
    source: str = Field(min_length=1)


class Owned(Part):
    """One GPU with its share of the machine, bought. Electricity is counted for the hours in which it trains: the
    GPU's measured power and `host_idle_watts` for the machine around it."""

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
    """What one GPU costs: rented, owned, or both to compare."""

    rent: Rent | None = None
    owned: Owned | None = None

    @model_validator(mode="after")
    def _check(self) -> Price:
        if self.rent is None and self.owned is None:
            raise ValueError("needs `rent:`, `owned:` or both")
        return self


@dataclass(frozen=True, slots=True)
class Prices:
    """The file's prices by canonical GPU name."""

    path: Path
    by_gpu: dict[str, Price]

    def of(self, gpu: str | None) -> Price | None:
        """Return the price of a GPU by the name that its driver reports."""
        return None if gpu is None else self.by_gpu.get(canonical_name(gpu))


def load_prices(path: Path, used: Collection[str] = ()) -> Prices:
    """Return the prices in a YAML file. `used` are the GPUs of the runs; a name that is neither among them nor in the
    GPU table is a mistake. Raise SpecError with one `file:line: key: sentence` for each mistake."""
    problems: list[str] = []
    by_gpu: dict[str, Price] = {}
    names: dict[str, str] = {}
    allowed = {*(gpu.name for gpu in gpus()), *used}
    for name, values in read_yaml(
        path, "a price file", "a GPU and what it costs (see configs/prices-example.yaml)", dates=True
    ).items():
        gpu, where = canonical_name(name), f"{location(path, [name])}: {name}: "
        if gpu in names:
            problems.append(f"{where}is the same GPU as {names[gpu]!r}: keep one of them")
        elif gpu not in allowed:
            hint = nearest(name, allowed) or "; `ftbench list gpus` shows the names"
            problems.append(f"{where}is no GPU of these runs and none that ftbench knows{hint}")
        names[gpu] = name
        try:
            by_gpu[gpu] = Price.model_validate(values)
        except ValidationError as error:
            problems += in_file(error, path, Price, name)
    if problems:
        raise SpecError(*problems)
    return Prices(path, by_gpu)
