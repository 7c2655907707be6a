"""Compute norms, rotary embedding and silu(gate) * up of a decoder layer with Triton kernels.
`spec/optimizations/compute.py` lists the supported model families.

With `fused_lora`, the input of a matrix product has extra columns for the adapters (`Augmented`). The kernels write
their output with these extra columns, so no copy is needed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftbench.kernels import mixins
from ftbench.kernels.rms_norm import RmsNorm, SumRmsNorm
from ftbench.kernels.rotary import RotaryHeads
from ftbench.kernels.swiglu import SwiGlu

_GROUP = "joined_group"  # attribute of a module: the AdapterGroup of fused_lora that computes its linear layers


def _group(module: Any) -> Any:
    """Return the AdapterGroup of fused_lora that computes the module's linear layers together. Return None if
    fused_lora is off or the adapters are disabled."""
    group = getattr(module, _GROUP, None)
    return group if group is not None and group.is_on() else None


def _room(module: Any) -> int:
    group = _group(module)
    return 0 if group is None else group.columns


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _joined(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of all layers in an AdapterGroup side by side: (tokens, sum of widths + extra columns)."""
    return group.product(_rows(x))


class _Norm:
    """Mixin that computes the decoder's last norm with a Triton kernel."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = RmsNorm.apply(_rows(hidden_states), self.weight, self.variance_epsilon, 0)[0]
        return normed.view(hidden_states.shape)


class _Layer:
    """Mixin for a decoder layer. Kernels compute its two norms and the residual addition between attention and MLP."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shape, norm = hidden_states.shape, self.post_attention_layernorm
        first, room = self.input_layernorm, _room(self.self_attn)
        normed, stream = RmsNorm.apply(_rows(hidden_states), first.weight, first.variance_epsilon, room)
        attended, _ = self.self_attn(hidden_states=normed.view(*shape[:-1], -1), **kwargs)
        given = (_rows(attended), stream, norm.weight, norm.variance_epsilon, _room(self.mlp))
        normed, stream = SumRmsNorm.apply(*given)
        return stream.view(shape) + self.mlp(normed.view(*shape[:-1], -1))


class _Attention:
    """Mixin for an attention module. A kernel computes the norms of the heads and the rotary embedding."""

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        shape = hidden_states.shape[:2]
        made = _heads(self, hidden_states, *map(_rows, position_embeddings))
        query, key, value = (part.view(*shape, *part.shape[1:]).transpose(1, 2) for part in made)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        eager = sys.modules[self.__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        options = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        out, weights = attend(self, query, key, value, attention_mask, sliding_window=window, **options, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


def _heads(attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Return query, key and value, each (tokens, heads, head_dim), after q_norm, k_norm and rotary embedding."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    group = _group(attention)
    parts = [_rows(layer(x)) for layer in layers] if group is None else [_joined(group, x), None, None]
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    return RotaryHeads.apply(*parts, [layer.out_features for layer in layers], *weights, cos, sin, eps)


class _Output:
    """Mixin for `o_proj`. With `fused_lora`, it returns the outputs of `Augmented` with their extra columns."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        group = _group(self)
        return super().forward(x) if group is None else _joined(group, x).view(*x.shape[:-1], -1)  # type: ignore[misc]


class _Mlp:
    """Mixin for a gated MLP. Kernels compute silu(gate) * up and its gradients."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        shape, group, down = (*x.shape[:-1], -1), _group(self), _group(self.down_proj)
        whole = None if group is None else group.gated(_rows(x), down)
        if whole is not None:
            return whole.view(shape)
        parts = [_rows(self.gate_proj(x)), _rows(self.up_proj(x))] if group is None else [_joined(group, x), None]
        gated: torch.Tensor = SwiGlu.apply(*parts, self.gate_proj.out_features)
        if down is None or down.columns:  # `down` needs an input with extra columns, but `gated` has none
            return self.down_proj(gated.view(shape))
        return _joined(down, gated).view(shape)


def replace_forward(layer: Any) -> None:
    """Make a decoder layer use the kernels: replace the classes of the layer, its attention and its MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    _join(attention, attention.q_proj, attention.k_proj, attention.v_proj)
    _join(attention.o_proj, attention.o_proj)
    pairs = [(layer, _Layer), (attention, _Attention), (attention.o_proj, _Output)]
    if hasattr(mlp, "gate_proj"):  # experts have other kernels
        _join(mlp, mlp.gate_proj, mlp.up_proj)
        _join(mlp.down_proj, mlp.down_proj)
        pairs.append((mlp, _Mlp))
    for module, mixin in pairs:
        mixins.add(mixin, module)


def replace_norm(norm: Any) -> None:
    """Make a norm outside the decoder layers use the kernel: replace its class."""
    mixins.add(_Norm, norm)


def _join(module: Any, *layers: Any) -> None:
    """Store the AdapterGroup of `layers` in `module`, if the group has no other layers and no layer has a bias."""
    group = getattr(layers[0], "group", None)
    if group is not None and group.holds(layers):
        setattr(module, _GROUP, group)
