"""Experts of a mixture of experts in MXFP4, as gpt-oss is published: frozen, kept in 4 bits, written out in 16 bits one
matrix at a time for as long as a product takes.

transformers' own MXFP4 experts answer and do not train: their kernel has no backward pass. Here the backward pass
writes the matrix out again, so that nothing in 16 bits is kept between the two, and no gradient of a frozen matrix is
computed. Adapters of experts are two thin products beside the frozen one; peft's would add them up to a whole matrix
and compute its gradient.

The format (OCP Microscaling Formats 1.0): 32 values share one scale, a power of two (E8M0: 2^(byte - 127)); a value is
four bits (E2M1), two of them in a byte, the lower half first.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import initialization
from transformers.models.gpt_oss import modeling_gpt_oss

from ftbench.kernels.expert_products import ExpertAdapter, GroupedExperts, grouped

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, each with either sign
BLOCK = 32  # values that share a scale


def scale_for(std: float) -> int:
    """Return the byte of the power of two that brings the spread of codes drawn evenly nearest to `std`."""
    spread = math.sqrt(sum(size * size for size in SIZES) / len(SIZES))
    return 127 + round(math.log2(std / spread))


def written_out(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrices that `blocks` (experts x out x in / 32 x 16, uint8) and `scales` (experts x out x in / 32,
    uint8) stand for: experts x out x in, in `dtype`."""
    rows, powers = blocks.view(-1, BLOCK // 2), scales.view(-1)
    decode = fused() if blocks.is_cuda else decoded
    for tensor in (rows, powers):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one kernel for every number of rows
    return decode(rows, powers, dtype).view(*blocks.shape[:-2], -1)


def decoded(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of 32 values for rows of 16 bytes with a scale each. All is made from bits, so that it is exact: a
    float32 has its sign in bit 31, its exponent (127 is 2^0) from bit 23 and its first digit after the point in bit
    22. A scale of 0 (2^-127) becomes zero."""
    places = 4 * torch.arange(2, dtype=torch.int32, device=blocks.device)
    codes = (blocks.to(torch.int32).unsqueeze(-1) >> places) & 15
    size = codes & 7  # two bits of exponent, one digit after the point
    normal = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).view(torch.float32)
    values = torch.where(size < 2, 0.5 * size, normal) * (1 - 2 * (codes >> 3))
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    return (values.flatten(1) * powers.unsqueeze(-1)).to(dtype)


@cache
def fused() -> Any:
    """Return one kernel that reads half a byte a value and writes two: step by step it would move twenty times as
    much."""
    return torch.compile(decoded)


class _FrozenProduct(torch.autograd.Function):
    """`grouped` with matrices in MXFP4. Keeps for the backward pass what is there anyway."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> Any:
        ctx.save_for_backward(blocks, scales, ends)
        return grouped(rows, written_out(blocks, scales, rows.dtype).transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        blocks, scales, ends = ctx.saved_tensors
        (gradient,) = gradients
        return grouped(gradient.contiguous(), written_out(blocks, scales, gradient.dtype), ends), None, None, None


class Mxfp4Experts(GroupedExperts, nn.Module):
    """Takes the place of transformers' GptOssExperts, with weights under the names of the published checkpoint."""

    has_bias = True
    is_transposed = True  # for peft: the matrix that `declared` tells of is experts x in x out

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.limit, self.alpha = config.num_local_experts, 7.0, 1.702
        wide, narrow = config.hidden_size, config.intermediate_size
        self.shapes = {"gate_up_proj": (wide, 2 * narrow), "down_proj": (narrow, wide)}  # in, out
        self.adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for name, (into, out) in self.shapes.items():
            groups = (self.num_experts, out, into // BLOCK)
            for suffix, shape in (("blocks", (*groups, BLOCK // 2)), ("scales", groups)):
                held = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
                self.register_parameter(f"{name}_{suffix}", held)
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(self.num_experts, out)))

    _apply_gate = modeling_gpt_oss.GptOssExperts._apply_gate

    def frozen(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        if 2 * len(rows) <= self.num_experts:  # an answer grows by a token: only the experts it visits are written out
            blocks, scales = blocks[experts], scales[experts]
            ends = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=rows.device)
        made: torch.Tensor = _FrozenProduct.apply(rows, blocks, scales, ends)
        return made


@contextmanager
def declared(model: Any) -> Iterator[None]:
    """Make the experts seem to have their matrices for the length of a block, in which peft makes adapters: one
    number each, seen as all of them. Afterwards their adapters are ours."""
    experts = [module for module in model.modules() if isinstance(module, Mxfp4Experts)]
    for module in experts:
        for name, (into, out) in module.shapes.items():
            zero = torch.zeros((), dtype=module.gate_up_proj_bias.dtype, device=module.gate_up_proj_bias.device)
            seen = nn.Parameter(zero.expand(module.num_experts, into, out), requires_grad=False)
            module.register_parameter(name, seen)
    try:
        yield
    finally:
        for module in experts:
            for name in module.shapes:
                delattr(module, name)
    for module in model.modules():
        if type(module) is ParamWrapper and isinstance(module.get_base_layer(), Mxfp4Experts):
            module.__class__ = ExpertAdapter


class _Instead:
    """What transformers' model code finds under the name of its experts; it asks too whether a module is one, to
    initialise weights, and ours are none."""

    def __new__(cls, config: Any) -> Any:
        return Mxfp4Experts(config)


@contextmanager
def as_experts() -> Iterator[None]:
    """Build a gpt-oss model within with its experts in MXFP4, and weights that nobody has set yet."""
    theirs = modeling_gpt_oss.GptOssExperts
    modeling_gpt_oss.GptOssExperts = _Instead
    try:
        with initialization.no_init_weights():
            yield
    finally:
        modeling_gpt_oss.GptOssExperts = theirs


def problems(model: Any) -> list[str]:
    """Return what of the experts is not in 4 bits, as sentences, empty when all are."""
    experts = [module for module in model.modules() if isinstance(module, Mxfp4Experts)]
    wide = [name for name, p in model.named_parameters()
            if ".experts." in name and "lora_" not in name and p.ndim > 2 and p.dtype != torch.uint8]  # fmt: skip
    if not experts:
        return ["method qlora: no layer holds experts in MXFP4"]
    return [f"method qlora: {wide[0]} is held in {len(wide)} matrices of 16 bits"] if wide else []
