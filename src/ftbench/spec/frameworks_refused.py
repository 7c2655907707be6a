"""Frameworks that were tried and do not train here: what each of them did, in an environment of its own without a
GPU (torch 2.13.0), and what to use instead."""

from __future__ import annotations

from ftbench.spec.base import shown

INSTEAD = "use trl, axolotl, llamafactory or ms-swift"
REFUSED = {
    "verl": (
        "verl's SFT trainer (0.9.1) asks for NCCL and for a CUDA device before its first step, and shuffles its "
        "samples whatever it is told, so that no run of it could be held against the same tokens"
    ),
    "nemo-automodel": (
        "NeMo AutoModel (0.7.0) loads its models onto a CUDA device alone, so that no run of it could be held against "
        "the same tokens"
    ),
    "megatron-bridge": "Megatron-Bridge imports Transformer Engine: import its logs with `ftbench import`",
    "torchtune": "the development of torchtune has stopped",
}
_ALSO = {"nemo": "nemo-automodel", "automodel": "nemo-automodel", "megatron": "megatron-bridge"}


def check(value: object) -> object:
    """Return the name of a framework. Raise ValueError with the reason for one that was tried and does not train."""
    name = _ALSO.get(str(value).lower(), str(value).lower())
    if reason := REFUSED.get(name):
        raise ValueError(f"{shown(value)} is not driven: {reason}: {INSTEAD}")
    return value
