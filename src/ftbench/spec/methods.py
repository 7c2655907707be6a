"""Declare the training methods, one class per method. The code of a method is in `worker/methods/<name>.py`.

Defaults are those of the founding study: rank 8, alpha 16, no dropout, adapters on the seven projections of each layer.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ftbench.errors import SpecError
from ftbench.facts import architecture
from ftbench.spec.base import Experiment, Float, Int, Model, Part, Switch, Word
from ftbench.spec.reading import read_config

GPT_OSS = "gpt_oss"  # families that are published in MXFP4 (docs/how-to/gpt-oss.md)
WITH_IMAGES = ("llava_next", "qwen2_5_vl", "qwen3_vl")  # families with images that can be trained
GRANULE = 8  # the rank of expert adapters must be a multiple of 8, because grouped products need rows of 16 bytes
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Method(Part):
    needs_gpu: ClassVar[bool] = False
    adapters: ClassVar[bool] = False  # whether it trains adapters on frozen weights

    @property
    def quantised(self) -> bool:
        """Whether the frozen weights are stored in 4 bits."""
        return False

    @property
    def mxfp4(self) -> bool:
        """Whether the expert weights stay in MXFP4, the published 4-bit format of gpt-oss."""
        return False

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        """Yield an error message for each setting of the spec that does not work with this method."""
        if spec.train.precision == "fp16" and self.quantised:
            yield (
                "train.precision fp16 scales gradients, and trl keeps the adapters of a quantised model in bfloat16: "
                "set train.precision to bf16 or fp32"
            )

    def machine_incompatibilities(self, spec: Experiment, capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield an error message if the method cannot train on a GPU of this compute capability (None: no GPU)."""
        if self.needs_gpu and capability is None:
            yield f"method {spec.method.name} needs a GPU for its kernels: use lora or qlora"


def family(model: Model) -> str | None:
    """Return the `model_type` of a model, such as `llama`. Return None if the configuration is not available."""
    return configuration(model).get("model_type")


def decoder_family(model: Model) -> str | None:
    """Return the `model_type` of the language model, such as `mistral` for LLaVA-NeXT."""
    config = configuration(model)
    kind: str | None = config.get("text_config", config).get("model_type")
    return kind


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys of the number of experts
DIVIDED = ("num_hidden_layers", "num_key_value_heads", "num_attention_heads", *EXPERTS)  # keys of division_problems


def has_experts(model: Model) -> bool:
    """Return whether the model is a mixture of experts. Return False if the configuration is not available."""
    return any(map(configuration(model).get, EXPERTS))  # no model with images that ftbench trains has experts


def configuration(model: Model) -> Mapping[str, Any]:
    """Return a model's configuration from `model.path` or from the table of known models. Return {} if unknown."""
    if model.path:
        file = Path(model.path)
        file = file / "config.json" if file.is_dir() else file
        with suppress(OSError, ValueError, SpecError):  # if config.json is broken, the worker reports it
            return _read(file, file.stat().st_mtime_ns)
    return architecture(model.id)


@lru_cache(maxsize=64)
def _read(file: Path, modified: int) -> dict[str, Any]:
    return read_config(file)


def reads_images(model: Model) -> bool:
    """Return whether a model may support images. Return True for unknown models, which the worker checks later."""
    return family(model) in (None, *WITH_IMAGES)


class Full(_Method):
    """Train every weight of the model."""

    name: Literal["full"] = "full"

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        if spec.train.precision == "fp16" and spec.model.dtype in ("float16", "bfloat16"):
            yield (
                "full fine-tuning with train.precision fp16 scales gradients, which needs 32-bit weights: "
                "set model.dtype to float32"
            )


Trained = Literal["frozen", "lora", "full"]


class _Adapters(_Method):
    adapters: ClassVar[bool] = True
    removed: ClassVar[tuple[str, ...]] = ("bias",)

    rank: Int = Field(8, ge=1, le=4096, description="rank of the adapter matrices")
    alpha: Float = Field(16, gt=0, description="scale of the adapters is alpha / rank")
    dropout: Float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        PROJECTIONS,
        description="names of the linear layers that get adapters, or all-linear; fused experts are not included",
    )
    vision: Trained = Field("frozen", description="training of the vision encoder: none, with adapters, or full")
    projector: Trained = Field("frozen", description="how the projector between encoder and language model is trained")
    experts: Switch = Field(False, description="also train adapters on fused expert weights (peft target_parameters)")

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        yield from super().incompatibilities(spec)
        if any(target.rsplit(".", 1)[-1] == "lm_head" for target in self.targets):
            yield "method.targets: lm_head cannot have an adapter with trl's chunked loss: leave it out"
        trained = {self.vision, self.projector}
        if trained != {"frozen"} and not reads_images(spec.model):
            yield f"method.vision and method.projector: {spec.model.id} is text-only: leave them out"
        if "full" in trained and spec.measure.save_adapter:
            yield "measure.save_adapter saves only adapters: set method.vision and method.projector to frozen or lora"
        if self.experts and self.dropout:
            yield "method.experts needs method.dropout 0: peft has no dropout for fused expert matrices"


class Lora(_Adapters):
    """Train adapters on frozen 16-bit weights."""

    name: Literal["lora"] = "lora"


class Qlora(_Adapters):
    """Train adapters on frozen 4-bit weights."""

    name: Literal["qlora"] = "qlora"
    quant_type: Literal["nf4", "fp4", "mxfp4"] = Field(
        "nf4",
        description="4-bit type of the frozen weights; mxfp4: only gpt-oss, with published 4-bit experts and other "
        "weights in 16 bits (docs/how-to/gpt-oss.md)",
    )
    double_quant: Switch = Field(True, description="also quantize the scales of the blocks (nf4 and fp4)")
    upcast: Switch = Field(
        True,
        description="cast the other weights (embedding, norms, output head) to float32 as peft does; off: keep them in "
        "model.dtype to save memory",
    )
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of 4-bit weights in matrix products; auto: like model.dtype"
    )

    @property
    def quantised(self) -> bool:
        return True

    @property
    def mxfp4(self) -> bool:
        return self.quant_type == "mxfp4"

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        yield from super().incompatibilities(spec)
        model = spec.model
        if not self.mxfp4:
            if family(model) == GPT_OSS and model.weights == "pretrained":
                yield (
                    f"method qlora with quant_type {self.quant_type}: the weights of {model.id} are published in mxfp4 "
                    "and cannot be quantised again: set method.quant_type to mxfp4, or use lora, which loads them in "
                    "16 bits"
                )
            return
        if family(model) not in (None, GPT_OSS):
            yield f"method.quant_type mxfp4 is the format of gpt-oss, and {model.id} is {family(model)}: use nf4"
        if not self.double_quant or self.compute_dtype not in ("auto", model.dtype):
            yield "method.double_quant and method.compute_dtype are for nf4 and fp4: leave them out with mxfp4"
        if model.dtype == "float16":
            yield "method.quant_type mxfp4 computes in bfloat16: leave model.dtype auto"
        if spec.optimizations.compile:
            yield "optimizations.compile cannot compile layers of quant_type mxfp4 as one graph: set it to off"
        if self.experts and self.rank % GRANULE:
            yield f"method.experts with quant_type mxfp4 needs a rank that is a multiple of {GRANULE}, not {self.rank}"

    def machine_incompatibilities(self, spec: Experiment, capability: tuple[int, int] | None) -> Iterator[str]:
        if self.mxfp4 and capability is not None and (capability < (8, 0) or spec.model.dtype == "float32"):
            yield (
                "method.quant_type mxfp4 uses grouped bfloat16 products, which need a GPU of compute capability 8.0 or "
                "higher and model.dtype auto: use nf4"
            )


class Unsloth(_Adapters):
    """Train adapters with unsloth's kernels."""

    needs_gpu: ClassVar[bool] = True
    removed = ("bias", "load_in_fp8", "offload_layers", "offload_embedding", "tiled_mlp")

    name: Literal["unsloth"] = "unsloth"
    load_in_4bit: Switch = Field(True, description="quantize the frozen weights to 4 bits")
    use_gradient_checkpointing: Annotated[Literal["unsloth", "on", "off"], Word] = Field(
        "unsloth", description="unsloth: keep layer inputs in host memory; on: torch's checkpointing"
    )
    padded: Switch = Field(
        False, description="pad batches; off: unsloth chooses, and most text models get one row without padding"
    )
    block_compile: Switch = Field(True, description="let unsloth compile each decoder layer; works for padded batches")
    cuda_graphs: Switch = Field(False, description="CUDA graphs of compiled layers, for batches with few shapes")
    compile_maximum: Switch = Field(False, description="compile with more autotuning (UNSLOTH_COMPILE_MAXIMUM)")
    random_state: Int = Field(3407, ge=0, description="unsloth's seed for the adapters")

    @property
    def quantised(self) -> bool:
        return self.load_in_4bit

    def incompatibilities(self, spec: Experiment) -> Iterator[str]:
        yield from super().incompatibilities(spec)
        if family(spec.model) in WITH_IMAGES:
            for name in ("packing", "padding_free"):
                if getattr(spec.optimizations, name):
                    yield f"optimizations.{name} with method unsloth supports only text: set it to off"
            if "full" in (self.vision, self.projector):
                yield "method.vision and method.projector: unsloth trains only adapters: set them to frozen or lora"
        if self.padded and (spec.optimizations.packing or spec.optimizations.padding_free):
            yield "method.padded: optimizations.packing and padding_free remove the padding: set one to off"
        if self.cuda_graphs and not self.block_compile:
            yield "method.cuda_graphs needs method.block_compile: set it to on"
        if spec.optimizations.packing and spec.optimizations.fixed_shape:
            yield "optimizations.fixed_shape with method unsloth needs one sample per row: set packing to off"


Method = Annotated[Full | Lora | Qlora | Unsloth, Field(discriminator="name")]
METHODS: dict[str, type[Full] | type[Lora] | type[Qlora] | type[Unsloth]] = {
    "full": Full,
    "lora": Lora,
    "qlora": Qlora,
    "unsloth": Unsloth,
}
