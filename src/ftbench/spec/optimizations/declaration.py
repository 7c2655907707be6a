"""What an optimization says of itself, in `spec/optimizations/<name>.py`; how it is applied and verified stands in
`worker/optimizations/<name>.py`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BeforeValidator

from ftbench.spec.base import Experiment, Switch

OFF = (False, "off", "auto")
EXACT = 0.001  # the same products in the same order: an order of magnitude above what repeats differ by
ROUNDING = 0.01  # the same sums in another order, each rounded to bfloat16
COARSE = 0.05  # fewer bits in the products, the weights or the optimizer's state

Capability = tuple[int, int] | None  # of the GPU; None is a machine without one


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`share` of the baseline's loss that a step may differ by. Where the samples come in `another_order`, no step of
    one is a step of the other, and the share is that of the mean loss over equally many samples."""

    share: float
    another_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """One key of `optimizations:`. The functions are asked only where it is on, and answer in sentences with a way out.

    `description` says what it does and what it costs; `verified`, how a run shows that it was applied; `tolerance`, how
    closely the loss must follow; `unsloth`, why not beside method unsloth and what to do instead (None: it does);
    `pairs`, the same beside objective dpo, where a test shows that it trains what plain dpo does; `images`, what it
    does with images, for data that have none.
    `excludes` holds, for each key of the spec that may not be on beside it, the reason; `refusals` are what else it
    excludes or needs on any machine, `refusals_on` on a machine of this compute capability.
    It is applied after those named in `after`. An ablation tries each value on the plain recipe
    with `beside[value]` switched on, and not those in `not_ablated`."""

    type: Any = Switch
    default: Any = False
    description: str
    verified: str
    tolerance: Tolerance
    unsloth: str | None = None
    images: str | None = None
    pairs: str | None = "nothing shows so far that it trains the same pairs: leave it off"
    excludes: Mapping[str, str] = field(default_factory=dict)
    refusals: Callable[[Experiment], Iterable[str]] = lambda spec: ()
    refusals_on: Callable[[Experiment, Capability], Iterable[str]] = lambda spec, capability: ()
    needs_gpu: bool = False
    after: tuple[str, ...] = ()
    beside: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    not_ablated: tuple[Any, ...] = ()


def offload_needs_gpu(name: str) -> Callable[[Experiment, Capability], Iterable[str]]:
    """Return a check that rejects the value `offload` of an optimization on a machine without a GPU."""

    def refusals_on(spec: Experiment, capability: Capability) -> Iterable[str]:
        if getattr(spec.optimizations, name) == "offload" and capability is None:
            yield f"optimizations.{name} offload needs a GPU whose memory it saves: set it to on"

    return refusals_on


def or_words(*words: str) -> Any:
    """Return a validator for a switch that also takes some words."""

    def check(value: object) -> object:
        if value not in words and not isinstance(value, bool):
            raise ValueError(f"must be {', '.join(('on', 'off', *words)[:-1])} or {words[-1]}")
        return value

    return BeforeValidator(check)


def or_number(what: str, lowest: int, highest: int, also: str = "on, off") -> Any:
    """Return a validator for a switch that also takes a number of something; for one that cannot be just on, where that
    is not among what it `also` takes."""

    def check(value: object) -> object:
        switch, number = isinstance(value, bool), isinstance(value, int) and lowest <= value <= highest
        if not (switch or number) or (value is True and "on" not in also.split(", ")):
            raise ValueError(f"must be {also} or {what}, {lowest:,} to {highest:,}")
        return value

    return BeforeValidator(check)
