"""Frozen linear layers multiplied by Transformer Engine in 8-bit floats.

accelerate's conversion also converts adapters and norms, and stops at the first layer whose sides do not fit. This
one converts only the frozen layers under the adapters.
"""

from typing import Any

import torch

RECIPES = {  # classes of transformer_engine.common.recipe
    "te-current": "Float8CurrentScaling",
    "te-delayed": "DelayedScaling",
    "te-mxfp8": "MXFP8BlockScaling",
}
ROWS = 32  # products need a multiple of 16 rows, or of 32 if a block shares a scale; 577 tokens are neither


class TeLinear(torch.nn.Module):
    """A frozen linear layer computed by Transformer Engine, for inputs with any number of rows."""

    def __init__(self, base: torch.nn.Linear, recipe: str) -> None:
        super().__init__()
        import transformer_engine.pytorch as engine
        from transformer_engine.common import recipe as recipes

        weight, self._autocast = base.weight, engine.fp8_autocast
        self._recipe = getattr(recipes, RECIPES[recipe])()
        self.in_features, self.out_features = base.in_features, base.out_features
        options = {"bias": base.bias is not None, "params_dtype": weight.dtype, "device": weight.device}
        self.linear = engine.Linear(base.in_features, base.out_features, **options)
        self.linear.weight.data = weight.data
        if base.bias is not None:
            self.linear.bias.data = base.bias.data
        self.linear.requires_grad_(False)

    @property
    def weight(self) -> Any:
        """Return the frozen weight under the name that peft reads."""
        return self.linear.weight

    @property
    def bias(self) -> Any:
        return getattr(self.linear, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features).to(self.linear.weight.dtype)
        missing = -len(flat) % ROWS
        with self._autocast(enabled=True, fp8_recipe=self._recipe):
            made = self.linear(torch.nn.functional.pad(flat, (0, 0, 0, missing)))
        return made[: len(flat)].view(*x.shape[:-1], self.out_features)

    def forward_in_16_bits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the 16-bit weight, for a few rows."""
        return torch.nn.functional.linear(x, self.linear.weight.to(x.dtype), self.bias)
