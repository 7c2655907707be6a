"""What is trained: one class a method, METHODS the table. The other half of a method is `worker/methods/<name>.py`.

Defaults are the founding study's: rank 8, alpha 16, no dropout, no bias, the seven projections of each layer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from ftbench.spec.base import Float, Int, Part, Switch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Method(Part):
    needs_gpu: ClassVar[bool] = False

    @property
    def quantised(self) -> bool:
        """Whether the frozen weights are stored in 4 bits."""
        return False

    @property
    def mxfp4(self) -> bool:
        """Whether the experts stay in the format in which gpt-oss is published."""
        return False


class Full(_Method):
    """Every weight of the model is trained."""

    name: Literal["full"] = "full"


def _targets(value: object) -> object:
    names = isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value)
    if value != "all-linear" and not names:
        raise ValueError("must be all-linear or a list of names, for example [q_proj, v_proj]")
    return value


class _Adapters(_Method):
    rank: Int = Field(8, ge=1, le=4096, description="rank of the adapter matrices")
    alpha: Float = Field(16, gt=0, description="scale of the adapters is alpha / rank")
    dropout: Float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    bias: Literal["none", "all", "lora_only"] = Field("none", description="which biases are trained")
    targets: Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_targets)] = Field(
        PROJECTIONS, description="names of the linear layers that get adapters, or all-linear"
    )
    experts: Switch = Field(
        False, description="adapters on the fused expert weights of a mixture of experts too (peft target_parameters)"
    )


class Lora(_Adapters):
    """Adapters on frozen 16-bit weights."""

    name: Literal["lora"] = "lora"


class Qlora(_Adapters):
    """Adapters on frozen weights quantised to 4 bits."""

    name: Literal["qlora"] = "qlora"
    quant_type: Literal["nf4", "fp4", "mxfp4"] = Field(
        "nf4",
        description="4-bit data type of the frozen weights; mxfp4: gpt-oss as published, its experts in 4 bits and the "
        "rest in 16 (docs/gpt-oss.md)",
    )
    double_quant: Switch = Field(True, description="quantise the block constants too (nf4 and fp4)")
    upcast: Switch = Field(
        True,
        description="cast what is not quantised (embedding, norms, output head) to float32, as peft does; off keeps it "
        "in model.dtype, for less memory",
    )
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type that weights are dequantised to for a product; auto as for model.dtype"
    )

    @property
    def quantised(self) -> bool:
        return True

    @property
    def mxfp4(self) -> bool:
        return self.quant_type == "mxfp4"


class Unsloth(_Adapters):
    """Adapters through unsloth's own kernels."""

    needs_gpu: ClassVar[bool] = True

    name: Literal["unsloth"] = "unsloth"
    load_in_4bit: Switch = Field(True, description="quantise the frozen weights to 4 bits")
    use_gradient_checkpointing: Literal["unsloth", "on", "off"] = Field(
        "unsloth", description="unsloth's own, which moves layer inputs to host memory; on is torch's"
    )
    random_state: Int = Field(3407, ge=0, description="unsloth's seed for the adapters")

    @property
    def quantised(self) -> bool:
        return self.load_in_4bit

    @field_validator("use_gradient_checkpointing", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Method = Annotated[Full | Lora | Qlora | Unsloth, Field(discriminator="name")]
METHODS: dict[str, type[Full] | type[Lora] | type[Qlora] | type[Unsloth]] = {
    "full": Full,
    "lora": Lora,
    "qlora": Qlora,
    "unsloth": Unsloth,
}
