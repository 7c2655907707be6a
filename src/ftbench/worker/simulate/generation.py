"""Completions of a simulated step: tokens that nobody drew, and of the many that are made alike only the last ones."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer

MADE = 3  # tokens of each completion that are made: by the prompts, and the two with the most keys and values


@contextmanager
def completions(loop: Any) -> Iterator[None]:
    """Let `generate` draw tokens within the block that end no completion, of which trl's metrics are numbers."""
    from trl.trainer import grpo_trainer

    token = next(token for token in count() if token not in loop.eos_token_ids)
    with (
        mock.patch.object(torch, "multinomial", partial(_drawn, token)),
        mock.patch.object(grpo_trainer, "nanmin", torch.min),
        mock.patch.object(grpo_trainer, "nanmax", torch.max),
        mock.patch.object(GenerationMixin, "generate", _shortened(GenerationMixin.generate)),
    ):
        yield


def _drawn(token: int, probabilities: torch.Tensor, num_samples: int = 1, **how: Any) -> torch.Tensor:
    """Stand for the drawing of one token of each row, which makes as much noise as there are probabilities
    (aten/src/ATen/native/Distributions.cpp, multinomial)."""
    torch.empty_like(probabilities)
    return torch.full((len(probabilities), num_samples), token, device=probabilities.device)


def _shortened(generate: Any) -> Any:
    """Return `generate` for completions of which the tokens between the first and the last ones are there at once."""

    def shortened(model: Any, *args: Any, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        skipped = max(0, generation_config.max_new_tokens - MADE)
        config = copy.copy(generation_config)
        config.max_new_tokens, config.min_new_tokens = (
            number and max(1, number - skipped) for number in (config.max_new_tokens, config.min_new_tokens)
        )
        with mock.patch.object(GenerationMixin, "_update_model_kwargs_for_generation", _lengthened(skipped)):
            made = generate(model, *args, generation_config=config, **kwargs)
        return F.pad(made, (0, skipped), value=int(made[0, -1]))

    return shortened


def _lengthened(tokens: int) -> Any:
    """Return the method that tells `generate` of one more token, the first time of so many more, whose keys and values
    are there then."""
    inner, left = GenerationMixin._update_model_kwargs_for_generation, [tokens]

    def lengthened(model: Any, outputs: Any, kwargs: dict[str, Any], *args: Any, **how: Any) -> dict[str, Any]:
        more = left.pop() if left else 0
        known: dict[str, Any] = inner(model, outputs, kwargs, *args, **how | {"num_new_tokens": 1 + more})
        for layer in known["past_key_values"].layers if more else ():
            if isinstance(layer, DynamicLayer):  # others are as large after any number of tokens
                layer.update(*(each[:, :, -1:].expand(-1, -1, more, -1) for each in (layer.keys, layer.values)))
        return known

    return lengthened
