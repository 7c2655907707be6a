"""Types and messages that all sections of a spec share, and the declaration of an optimization."""

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment as Experiment
    from ftbench.spec.experiment import Launch as Launch
    from ftbench.spec.experiment import Model as Model
else:
    Experiment = Launch = Model = Any  # for annotations in modules that experiment.py imports

MAX_NUMBER = 2**63 - 1
_SWITCHED_OFF: tuple[object, ...] = (None, False, "off", "none", [], ())


class Part(BaseModel):
    """Base class of the sections of a spec. Objects are frozen, and unknown keys are errors. A key in `removed`, which
    earlier versions had, is ignored if its value is off."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )
    removed: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in cls.removed or value not in _SWITCHED_OFF}


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {'on/yes/true' if value else 'off/no/false'}")
    return value


def _switch(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be on or off")
    return value


Int = Annotated[int, BeforeValidator(_number), Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Float = Annotated[float, BeforeValidator(_number)]
Switch = Annotated[bool, BeforeValidator(_switch)]
# YAML reads `off` as false and `on` as true.
Word = BeforeValidator(lambda value: ("on" if value else "off") if isinstance(value, bool) else value)


def nearest(word: str, words: Iterable[str], similarity: float = 0.6) -> str:
    """Return `; did you mean NAME?` with the most similar of `words`, or "" if none has at least this similarity."""
    by_letters = {unicodedata.normalize("NFKC", each).casefold(): each for each in words}
    close = difflib.get_close_matches(unicodedata.normalize("NFKC", word).casefold(), by_letters, 1, similarity)
    return f"; did you mean {by_letters[close[0]]}?" if close else ""


def known(word: str, words: Iterable[str], kind: str) -> str:
    """Return `word` if it is one of `words`. Otherwise raise a ValueError that lists the allowed words."""
    words = list(words)
    if word not in words:
        raise ValueError(f"{shown(word)} is not a {kind}{nearest(word, words)} (allowed: {', '.join(words)})")
    return word


def shown(value: object) -> str:
    """Return the repr of a value, shortened to 80 characters."""
    return shortened(repr(value), 80)


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# --- optimizations ---------------------------------------------------------------------------------------------------

OFF = (False, "off", "auto")

Capability = tuple[int, int] | None  # compute capability of the GPU; None without a GPU
OWN_KERNELS = "unsloth has its own kernels: set it to off"
OWN_LOSS = "unsloth has its own fused loss: set it to off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """Declare a key of the section `optimizations:` and its rules. The rules apply only if the optimization is on.

    Args:
        description: The effect and cost of the optimization, in one line.
        not_with_unsloth: Error message if the method is unsloth. None if the optimization works with unsloth.
        not_with_dpo: Error message if the objective is dpo. None if a test compares the optimization with plain dpo.
        needs_images: Whether the optimization needs a dataset with images.
        excludes: {key of the spec: error message if this key and the optimization are both on}.
        incompatibilities: Function that returns error messages for settings of the spec.
        machine_incompatibilities: Function that returns error messages for a GPU's compute capability.
        after: Names of the optimizations that must be applied before this one.
        ablate_with: {value: other changes to the spec when `ftbench ablate` tries this value}.
        not_ablated: Values that `ftbench ablate` does not try.
    """

    type: Any = Switch
    default: Any = False
    description: str
    not_with_unsloth: str | None = None
    not_with_dpo: str | None = "it was not compared with plain dpo: set it to off"
    needs_images: bool = False
    excludes: Mapping[str, str] = field(default_factory=dict)
    incompatibilities: Callable[[Experiment], Iterable[str]] = lambda spec: ()
    machine_incompatibilities: Callable[[Experiment, Capability], Iterable[str]] = lambda spec, capability: ()
    needs_gpu: bool = False
    after: tuple[str, ...] = ()
    ablate_with: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    not_ablated: tuple[Any, ...] = ()
