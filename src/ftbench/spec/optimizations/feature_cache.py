"""What a frozen encoder and projector make of an image, kept for later epochs."""

from collections.abc import Iterator

from ftbench.spec.base import Experiment
from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance


def _refusals(spec: Experiment) -> Iterator[str]:
    parts = ("vision", "projector")
    trained = [part for part in parts if getattr(spec.method, part, "full") != "frozen"]
    if trained and spec.method.name == "full":
        yield "optimizations.feature_cache keeps what does not change, and method full trains it: use lora or qlora"
    elif trained:
        keys = " and ".join(f"method.{part}" for part in trained)
        yield f"optimizations.feature_cache keeps what does not change: set {keys} to frozen"


OPTIMIZATION = Optimization(
    description="keep in the host's memory what a frozen encoder and projector make of each image, and compute it in "
    "the first epoch alone",
    verified="what the images of the first step became is kept",
    tolerance=Tolerance(EXACT),
    images="keeps what images become",
    unsloth="its own classes compute the features: leave it off",
    refusals=_refusals,
)
