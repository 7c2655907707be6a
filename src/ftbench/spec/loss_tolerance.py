"""How closely a run's loss must follow the plain one's: one table, by what differs between the two.

What was seen on an H200 (results/h200), the worst step of 14: repeats of one spec 0.013 %, selective checkpointing
0.010 %, compile, chunked_loss and liger 0.014 %, padding_free with varlen 0.07 %, fp8 tensorwise 0.10 %, LoRA against
QLoRA of an 8B model 1.9 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXACT = 0.001  # the same products in the same order: an order of magnitude above what repeats differ by
ROUNDING = 0.01  # the same sums in another order, each rounded to bfloat16
COARSE = 0.05  # fewer bits in the products, the weights or the optimizer's state


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`share` of the baseline's loss that a step may differ by. Where the samples come in `another_order`, no step of
    one is a step of the other, and the share is that of the mean loss over equally many samples."""

    share: float
    another_order: bool = False


TOLERANCES: dict[str, Tolerance] = {
    "optimizations.gradient_checkpointing": Tolerance(EXACT),
    "optimizations.activation_offload": Tolerance(EXACT),
    "optimizations.attention": Tolerance(ROUNDING),
    "optimizations.padding_free": Tolerance(ROUNDING),
    "optimizations.packing": Tolerance(COARSE, another_order=True),
    "optimizations.fixed_shape": Tolerance(ROUNDING),
    "optimizations.length_grouping": Tolerance(COARSE, another_order=True),
    "optimizations.chunked_loss": Tolerance(ROUNDING),
    "optimizations.liger": Tolerance(ROUNDING),
    "optimizations.compile": Tolerance(ROUNDING),
    "optimizations.fp8": Tolerance(COARSE),
    "optimizations.fused_lora": Tolerance(ROUNDING),
    "train.optimizer": Tolerance(COARSE),
    "method.name": Tolerance(COARSE),
    "method.quant_type": Tolerance(COARSE),
    "method.double_quant": Tolerance(COARSE),
    "method.load_in_4bit": Tolerance(COARSE),
    "method.upcast": Tolerance(COARSE),
}
_SAME_MACHINE = ("gpu", "versions.torch")


def tolerance(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> Tolerance:
    """The widest of what the facts of two runs differ in; `ROUNDING` where that is nothing of the table, or another
    machine. fp8 on one side or both is coarse: it rounds the smallest difference up to a bit of its own."""
    differing = [kept for key, kept in TOLERANCES.items() if baseline.get(key) != candidate.get(key)]
    shares = [kept.share for kept in differing]
    if not shares or any(baseline.get(key) != candidate.get(key) for key in _SAME_MACHINE):
        shares.append(ROUNDING)
    if any(side.get("optimizations.fp8", "off") != "off" for side in (baseline, candidate)):
        shares.append(COARSE)
    return Tolerance(max(shares), any(kept.another_order for kept in differing))
