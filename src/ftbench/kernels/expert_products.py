"""Compute mixture-of-experts layers and their LoRA adapters with grouped products (`kernels/expert_adapters.py`).

peft instead adds B A to a copy of each expert's matrix W. The gradients of these copies have the size of W.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ftbench.kernels import expert_rows, mixins
from ftbench.kernels.clamped_gate import clamped_gate
from ftbench.kernels.expert_adapters import add_adapter, grouped, in_rows

ALIGNED = 8  # the rank is padded to a multiple of 8: grouped products need rows of a multiple of 16 bytes


class GroupedExperts:
    """Mixin that computes all experts of a layer with grouped products. It extends transformers' class of fused
    experts, or `nn.Module`. gate_proj and up_proj are one parameter. `adapters` is {parameter name: (A, B, scale)}.
    A is (experts, in, rank), and B is (experts, rank, out)."""

    adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]]
    num_experts: int
    has_bias: bool
    is_transposed: bool
    is_clamped: bool  # whether `_apply_gate` is the gate of gpt-oss, which has `alpha` and `limit`
    alpha: float
    limit: float
    _apply_gate: Any

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (tokens, width): for each token, the weighted sum of the outputs of its k experts. `router_indices`
        (tokens, k) contains the experts of each token, and `routing_weights` (tokens, k) contains their weights."""
        experts, order = router_indices.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        rows = expert_rows.dispatch(hidden_states, order, slots, router_indices.shape[1])
        both, bias = self._product("gate_up_proj", rows, experts, ends)
        if self.is_clamped and expert_rows.has_kernels(both, bias):
            gated = clamped_gate(both, bias, experts, self.alpha, self.limit)
        else:
            gated = self._apply_gate(both if bias is None else both + bias[experts])
        rows, bias = self._product("down_proj", gated, experts, ends)
        return expert_rows.combine(rows, routing_weights, order, slots, bias, experts).to(hidden_states.dtype)

    def _product(
        self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return two tensors. The first is the product of each row with the matrix `name` of its expert, including the
        adapter. The second is the bias (experts, out) that the caller must add, or None if nothing must be added."""
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        dtype = (getattr(self, name) if bias is None else bias).dtype
        rows = rows.to(dtype)
        if name not in self.adapters:
            return self.frozen(name, rows, experts, ends), bias
        down, up, scaling = self.adapters[name]
        down, up = down.to(dtype), in_rows((scaling * up).to(dtype))
        product = partial(self.frozen, name, experts=experts, ends=ends)
        if (result := add_adapter(product, rows, down, up, ends, bias)) is not None:
            return result, None
        return product(rows) + grouped(grouped(rows, down, ends), up, ends), bias

    def frozen(self, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the product of each row with the matrix `name` of its expert. `experts` has the expert of each row."""
        matrices = getattr(self, name)
        return grouped(rows, matrices if self.is_transposed else matrices.transpose(-2, -1), ends)


class ExpertAdapter(ParamWrapper):
    """Replaces peft's adapter class for matrices of experts. Parameter names and shapes are the same. During a forward
    pass, `GroupedExperts.adapters` contains A and B of this adapter."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        held = self.get_base_layer().adapters
        for name in active_adapters:
            down = self.lora_A[name].weight.unflatten(0, (self.num_experts, -1)).transpose(-2, -1)
            up = self.lora_B[name].weight.unflatten(1, (-1, self.num_experts)).permute(2, 1, 0)
            if missing := -down.shape[-1] % ALIGNED:
                down, up = F.pad(down, (0, missing)), F.pad(up, (0, 0, 0, missing))
            held[self.parameter_name] = (down, up, self.scaling[name])
        try:
            yield
        finally:
            held.pop(self.parameter_name, None)


def _is_fused(module: Any) -> bool:
    """Return whether `GroupedExperts` computes the same as this module: transformers' fused experts with a gate, in 16
    or 32 bits."""
    names = ("num_experts", "has_bias", "is_transposed", "_apply_gate", "gate_up_proj", "down_proj")
    fused = getattr(module, "has_gate", False) and all(hasattr(module, name) for name in names)
    return fused and module.gate_up_proj.dtype.itemsize > 1


def group_experts(model: Any) -> None:
    """Make fused experts, and peft's adapters of fused experts, use grouped products."""
    for experts in filter(_is_fused, model.modules()):
        if not isinstance(experts, GroupedExperts):
            experts.adapters, experts.is_clamped = {}, type(experts)._apply_gate is GptOssExperts._apply_gate
            mixins.add(GroupedExperts, experts)
    for module in model.modules():
        if isinstance(module, ParamWrapper) and isinstance(module.get_base_layer(), GroupedExperts):
            module.__class__ = ExpertAdapter
