"""Rows that hold several samples, for models whose code does not see where one ends.

transformers tells samples in a row apart by positions that start again, and makes its masks so; gpt-oss's code (5.17)
makes its masks without the positions, and a sample would see those before it. Qwen2.5-VL's makes them with positions
that stand beside those to rotate by, and takes others for the latter alone.
"""

from typing import Any

from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ftbench.errors import SpecError
from ftbench.spec.methods import GPT_OSS
from ftbench.worker.model.parts import base_model, decoder

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def isolate_packed_samples(model: Any, name: str) -> None:
    """Give a model that makes its masks without the positions masks that are made with them. Raises SpecError, with the
    `name` of the optimization, for layers without masks: their state goes on from sample to sample."""
    base = base_model(model)
    if "linear_attention" in (getattr(base.config.get_text_config(), "layer_types", None) or ()):
        raise SpecError(
            f"optimizations.{name}: {type(base).__name__} has layers of linear attention, in which a sample would see "
            "those before it in its row: set it to off"
        )
    if base.config.get_text_config().model_type == GPT_OSS:
        decoder(model).register_forward_pre_hook(_with_masks, with_kwargs=True)
    if base.config.model_type == "qwen2_5_vl":
        decoder(model).register_forward_pre_hook(_with_both_positions, with_kwargs=True)


def _with_both_positions(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the positions of text both as the place in the sample and as time, row and column."""
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        return None
    return args, kwargs | {"position_ids": positions.expand(4, *positions.shape)}


def _with_masks(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    shape = decoder.embed_tokens.weight.new_empty((*positions.shape, 1))  # masks ask it for shape, type and device
    inputs = {"config": decoder.config, "inputs_embeds": shape, "attention_mask": None, "past_key_values": None}
    masks = {name: make(**inputs, position_ids=positions) for name, make in _MASKS.items()}
    return args, kwargs | {"attention_mask": masks}
