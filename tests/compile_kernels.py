"""Compiles our Triton kernels for GPUs that need not be here: python compile_kernels.py 80 90 120. Prints a line for
each kernel, architecture and type of tensors.

Not in a test's own process: there Triton interprets."""

from __future__ import annotations

import re
import sys
from inspect import signature

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftbench.kernels import (
    adamw,
    adapted_swiglu,
    adapter_copies,
    clamped_gate,
    delayed_cast,
    expert_adapters,
    expert_rows,
    rms_norm,
    rotary,
    swiglu,
    transposed_cast,
)  # fmt: skip

SCALARS = dict.fromkeys(("eps", "lr", "decay", "fresh1", "fresh2", "root"), "fp32")  # all others are integers
NUMBERS = re.compile(r".*_(row|head|stride)$|groups|columns|positions|heads|pairs|size|seed|tokens|.*rank")


def cases(norm: bool):
    """Each kernel with its constants: a width that is not a power of two, and both sides of each branch."""
    row = rms_norm._block(5120)
    head = rotary._blocks(28, 4, 128)
    short = {"LIMIT": 57344.0, "AGAIN": norm}
    yield delayed_cast._cast_to_fp8, {**short, "BLOCK": delayed_cast.BLOCK, "num_warps": 8}
    yield transposed_cast._cast_layouts, {"LIMIT": 57344.0, "BOTH": norm, **transposed_cast.TILE}
    yield adapter_copies._copy_scaled, {"BLOCK": adapter_copies.BLOCK}
    gate = adapted_swiglu.constants_of(24, torch.empty(0), torch.float8_e5m2)
    gate |= {"TYPE": triton.language.bfloat16, "STAGES": 3} if norm else {}
    yield adapted_swiglu._adapted_swiglu_forward, {**gate, "AGAIN": norm}
    yield adapted_swiglu._adapted_swiglu_backward, {**gate, "AGAIN": norm}
    plain = dict.fromkeys(("scale1", "numbers1", "scale2", "numbers2"))
    yield adamw._adamw, {"BLOCK": adamw.BLOCK, "num_warps": 8, **(plain if norm else {})}
    yield expert_rows._gather_sum, {"K": 8, "WEIGHTED": norm, "BIAS": norm, "BLOCK": expert_rows.BLOCK}
    yield expert_rows._combine_bwd, {"K": 8, "BIAS": norm, **row}
    tile = {"ROWS": expert_adapters.ROWS, "COLUMNS": expert_adapters.COLUMNS, "GROUPS": 128, "BIAS": norm}
    yield expert_adapters._add_products, {"RANK": 8 if norm else 256, "PADDED": 16 if norm else 256, **tile}
    clamped = {"ALPHA": 1.702, "LIMIT": 7.0, "BIAS": norm, "BLOCK": clamped_gate.BLOCK}
    yield clamped_gate._clamped_gate_forward, clamped
    yield clamped_gate._clamped_gate_backward, clamped
    yield swiglu._swiglu_backward, {"BLOCK": swiglu.BLOCK}
    yield rms_norm._rms_norm_forward, {"SUM": norm, **row}
    yield rms_norm._rms_norm_backward, {"SUM": norm, "WIDE": norm, **row}
    yield rotary._rotary_forward, {"NORM": norm, **head}
    yield rotary._rotary_backward, {"NORM": norm, **head}


def compiled(kernel, constants, dtype, architecture):
    """What Triton makes of a kernel whose tensors have this type."""
    warps = {"num_warps": constants.pop("num_warps", 4)}
    sums = dict.fromkeys(("factor", "maxima", "scale", "of_rows", "of_columns"), "*fp32")
    whole = dict.fromkeys(("table", "order", "slots", "experts"), "*i64")
    known_types = {"small": "*fp8e5", "transposed": "*fp8e5", "scales": "*fp32", "ends": "*i32", **whole, **sums}
    if "numbers1" in signature(kernel.fn).parameters and "numbers1" not in constants:
        known_types |= {"first": "*u8", "second": "*u8"}
    names = list(signature(kernel.fn).parameters)
    types = {
        name: SCALARS.get(name, "i32") if NUMBERS.fullmatch(name) or name in SCALARS else f"*{dtype}" for name in names
    }
    types |= {name: kind for name, kind in known_types.items() if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=warps)


for architecture in map(int, sys.argv[1:]):
    for dtype, norm in (("bf16", True), ("fp32", False)):
        for kernel, constants in cases(norm):
            assert compiled(kernel, dict(constants), dtype, architecture).asm["cubin"]
            print(kernel.fn.__name__, architecture, dtype)
