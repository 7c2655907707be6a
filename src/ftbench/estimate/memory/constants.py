"""The few constants of the estimator that no formula gives: shipped with the runs they came from, or the user's own."""

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ftbench.errors import DataError
from ftbench.facts import read_facts
from ftbench.store import machine, rundir

SCHEMA = 1
NAME = "estimator.json"


@dataclass(frozen=True, slots=True)
class Constants:
    """`allocated_factor` multiplies what the terms add up to. `context_gib` is what the driver and the CUDA context
    hold beside the allocator's pool. The others are what the pool holds beyond the tensors: a share of the logits'
    blocks, GiB for compiled graphs, a share of the activations where batches vary in shape, a share of the optimizer's
    temporary tensors where the step takes as much as the backward pass. `runs` names what they were fitted to, and
    `strategies` those of several GPUs whose runs agree with what is estimated of them."""

    allocated_factor: float
    context_gib: float
    logits_share: float
    compiled_gib: float
    varying_share: float
    optimizer_share: float
    runs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


FITTED = tuple(field.name for field in fields(Constants) if field.name not in ("runs", "strategies"))


def user_file() -> Path:
    """Return where `--calibrate` leaves the user's own: in ftbench's cache, so that they go with the machine."""
    return machine.cache_dir() / NAME


@cache
def shipped() -> Constants:
    return _read(read_facts("estimator.yaml"), "facts/estimator.yaml")


@cache
def constants() -> Constants:
    """Return the user's own where there are such, else the shipped ones. Raises DataError for a broken file."""
    path = user_file()
    try:
        return _read(json.loads(rundir.read_bytes(path)), str(path))
    except OSError:
        return shipped()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: {error}; calibrate again, or remove it to use the shipped constants") from None


def _read(values: Any, where: str) -> Constants:
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise DataError(f"{where}: is no file of constants (schema {SCHEMA}); calibrate again, or remove it")
    missing = [name for name in FITTED if not isinstance(values.get(name), (int, float))]
    if missing:
        raise DataError(f"{where}: {missing[0]} is missing; calibrate again, or remove the file")
    lists: dict[str, Any] = {name: tuple(values.get(name, ())) for name in ("runs", "strategies")}
    return Constants(**lists | {name: float(values[name]) for name in FITTED})


def write(values: Constants) -> Path:
    """Write the constants in the user's file. Raises MissingError where it cannot be."""
    path = user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise machine.cache_error(path.parent, error) from None
    rundir.write_json(path, {"schema": SCHEMA, **asdict(values)})
    constants.cache_clear()
    return path
