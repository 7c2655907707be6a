"""Switches that change speed or memory and not what is learned; the other half is `worker/optimizations/<name>.py`."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ftbench.spec.base import Part, Switch

OFF = (False, "off", "auto")


def _or(*words: str) -> Any:
    """A switch that also takes some words."""

    def check(value: object) -> object:
        if value not in words and not isinstance(value, bool):
            raise ValueError(f"must be {', '.join(('on', 'off', *words)[:-1])} or {words[-1]}")
        return value

    return BeforeValidator(check)


def _or_tokens(value: object) -> object:
    """A switch that also takes a number of tokens."""
    number = isinstance(value, int) and 16 <= value <= 1 << 20
    if not isinstance(value, bool) and not number:
        raise ValueError("must be on, off or the label tokens of a chunk, 16 to 1,048,576")
    return value


class Optimizations(Part):
    """Each is independent, and each is proven on the live objects before a number is believed."""

    gradient_checkpointing: Annotated[bool | Literal["selective", "offload"], _or("selective", "offload")] = Field(
        False,
        description="keep only each layer's input and compute the rest again in the backward pass: less memory, "
        "slower; selective does so in every second layer, offload keeps the inputs in host memory",
    )
    activation_offload: Switch = Field(
        False, description="keep what the backward pass needs in host memory (trl): less device memory, slower"
    )
    attention: Literal[
        "auto", "eager", "sdpa", "cudnn", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = Field(
        "auto",
        description="attention implementation; auto is the library's choice for the model; cudnn is sdpa with "
        "cuDNN's kernels; varlen is torch's own for rows without padding",
    )
    padding_free: Switch = Field(
        False, description="lay the samples of a batch end to end in one row instead of padding them"
    )
    packing: Switch = Field(
        False, description="fill rows of max_length with whole samples, each seeing only itself; batch_size counts rows"
    )
    fixed_shape: Switch = Field(
        False, description="pad every batch to the longest sample of the data set: one shape, one compiled graph"
    )
    length_grouping: Switch = Field(
        False, description="batch samples of like length: less padding, and another order of the samples"
    )
    chunked_loss: Annotated[bool | int, BeforeValidator(_or_tokens)] = Field(
        False,
        description="loss over chunks of the label tokens and its gradient at once, without trl's metrics and waits; a "
        "number is the tokens of a chunk (on is 2048): fewer need less memory",
    )
    liger: Switch = Field(False, description="Liger's Triton kernels: norms, rotary embedding, SwiGLU, fused loss")
    compile: Annotated[bool | Literal["dynamic"], _or("dynamic")] = Field(
        False,
        description="torch.compile each decoder layer: faster steps, a slow start, again for each new shape; dynamic "
        "compiles for all lengths at once",
    )
    fp8: Literal["off", "tensorwise", "rowwise"] = Field(
        "off", description="products with the frozen base layers in 8-bit floats cast once: faster where compiled"
    )

    fused_lora: Switch = Field(
        False,
        description="the adapters' products within the base product, layers that read one input together: fewer passes "
        "over the activations",
    )

    @field_validator("fp8", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false


def choices(key: str) -> list[Any]:
    """What an optimization can be set to, but for off, auto and a number."""
    return [value for value in _values(Optimizations.model_fields[key].annotation) if value not in OFF]


def _values(annotation: Any) -> list[Any]:
    """What a type of an option admits, but for false: a switch, words, or both."""
    if annotation is bool:
        return [True]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _values(part)]
