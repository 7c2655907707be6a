"""How closely a run's loss must follow the plain one's: one table, by what differs between the two.

What was seen on an H200 (results/h200), the worst step of 14: repeats of one spec 0.013 %, selective checkpointing
0.010 %, compile, chunked_loss and liger 0.014 %, padding_free with varlen 0.07 %, fp8 tensorwise 0.10 %, LoRA against
QLoRA of an 8B model 1.9 %.
"""

from collections.abc import Mapping

from ftbench.spec.optimizations import OPTIMIZATIONS
from ftbench.spec.optimizations.declaration import COARSE, ROUNDING, Tolerance

TOLERANCES: dict[str, Tolerance] = {
    **{f"optimizations.{name}": kept.tolerance for name, kept in OPTIMIZATIONS.items()},
    "train.optimizer": Tolerance(COARSE),
    "method.name": Tolerance(COARSE),
    "method.quant_type": Tolerance(COARSE),
    "method.double_quant": Tolerance(COARSE),
    "method.load_in_4bit": Tolerance(COARSE),
    "method.load_in_fp8": Tolerance(COARSE),
    "method.upcast": Tolerance(COARSE),
}
_SAME_MACHINE = ("gpu", "versions.torch")


def tolerance(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> Tolerance:
    """Return the widest of what the facts of two runs differ in; `ROUNDING` where that is nothing of the table, or
    another machine. fp8 on one side or both is coarse: it rounds the smallest difference up to a bit of its own."""
    differing = [kept for key, kept in TOLERANCES.items() if baseline.get(key) != candidate.get(key)]
    shares = [kept.share for kept in differing]
    if not shares or any(baseline.get(key) != candidate.get(key) for key in _SAME_MACHINE):
        shares.append(ROUNDING)
    if any(side.get("optimizations.fp8", "off") != "off" for side in (baseline, candidate)):
        shares.append(COARSE)
    return Tolerance(max(shares), any(kept.another_order for kept in differing))
