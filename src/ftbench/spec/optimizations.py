"""Switches that change speed or memory and not what is learned; the other half is `worker/optimizations/<name>.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ftbench.spec.base import Part, Switch


class Optimizations(Part):
    """Each is independent, and each is proven on the live objects before a number is believed."""

    gradient_checkpointing: Switch = Field(
        False,
        description="keep only each layer's input and compute the rest again in the backward pass: less memory, slower",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "auto", description="attention implementation; auto is the library's choice for the model"
    )
    compile: Switch = Field(
        False, description="torch.compile each decoder layer: faster steps, a slow start, again for each new shape"
    )
    fp8: Literal["off", "tensorwise", "rowwise"] = Field(
        "off", description="products with the frozen base layers in 8-bit floats (torchao): faster where compiled"
    )

    @field_validator("fp8", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false
