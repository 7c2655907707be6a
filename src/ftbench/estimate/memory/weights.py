"""Memory that stays between steps: weights, adapters, gradients, optimizer state. All in bytes."""

from dataclasses import dataclass

from ftbench.core.stats import grouped_by
from ftbench.estimate.workload.model import adapter_parameters, trained_vision, vision_adapter_parameters
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer, ModelShape

ALIGNED = 64  # fused_lora pads its buffers to a multiple of this number of columns (kernels/adapter_products.py)
_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate, up", "up_proj": "gate, up"}
BLOCK = 64  # weights that share an absmax constant (bitsandbytes, Linear4bit)
OUTER = 256  # block constants that share a constant under double quantization (Dettmers et al. 2023, section 3)
PAGED_FROM = 100_000  # bitsandbytes pages the state of matrices with at least this many elements
BLOCK_8BIT = 256  # elements that share a scale in an 8-bit state (bitsandbytes, blockwise quantisation)


def four_bit(count: float, double_quant: bool) -> float:
    """Return the bytes of `count` 4-bit weights and of their block constants.

    n weights take n/2 bytes and have n/64 constants of 4 bytes. With double quantization, a constant takes 1 byte, and
    each group of 256 constants takes 4 more bytes. This is 0.5 and 0.127 bits per parameter (Dettmers et al. 2023)."""
    constants = count / BLOCK
    return count / 2 + (constants * (1 + 4 / OUTER) if double_quant else constants * 4)


def weights(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the base model on the GPU.

    The weights have 16 bits. With a 4-bit method, linear layers have 4 bits and the rest has 16 bits, or 32 bits if
    peft's prepare_model_for_kbit_training casts it (dense models; `worker/methods/qlora.py`). unsloth keeps the experts
    of gpt-oss in MXFP4, so the founding study could train the 120b on 96 GB. fp8 replaces the 16-bit matrix of each
    linear layer by two 8-bit layouts (worker/optimizations/fp8.py). Weights in host memory are not included, but their
    buffers on the GPU are."""
    linear = model.linear_parameters
    if plan.packed_experts:
        total = model.weight_bytes(plan.weight, mxfp4=True)
    elif plan.quantised:
        total = four_bit(linear, plan.double_quant) + (model.total - linear) * plan.upcast + fused(model, plan)
    else:
        eight = linear if plan.fp8 else 0
        total = (model.total - eight) * plan.weight + 2 * eight + fused(model, plan)
    if not plan.streamed:
        return total
    return total - on_host(model, plan) + buffers(model, plan)


def buffers(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of weight_offload's two buffers on the GPU. Each has the size of the largest layer."""
    return 2 * max(matrices(layer, plan) for layer, _ in model.kinds)


def matrices(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of a layer's matrices. weight_offload copies them together."""
    linear = sum(each.inputs * each.outputs for each in layer.linears)
    others = layer.expert_matrices + layer.parameters["router"] - layer.router_biases
    four = plan.quantised and not plan.mxfp4
    return (four_bit(linear, plan.double_quant) if four else linear * plan.weight) + others * plan.weight


def fetched_head(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the head if weight_offload copies it to the GPU for the chunked loss."""
    there = plan.streamed and plan.loss == "chunked"
    return float(model.vocab * model.hidden * plan.upcast) if there else 0.0


def on_host(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of weights that weight_offload keeps in host memory (worker/optimizations/weight_offload.py)."""
    if not plan.streamed:
        return 0.0
    head = fetched_head(model, plan)
    embedding = 0.0 if model.tied else float(model.parameters["embedding"] * plan.upcast)
    return sum(count * matrices(layer, plan) for layer, count in model.kinds) + embedding + head


@dataclass(frozen=True, slots=True)
class Group:
    """Adapted layers that fused_lora computes together.

    `inputs` is the width of their common input. `outputs` and `ranks` are the sums of their output widths and of their
    ranks. fused_lora pads its buffers to `columns`, which is `ranks` rounded up to a multiple of 64."""

    reads: str
    inputs: int
    outputs: int
    ranks: int
    columns: int


def groups(plan: TrainingPlan, layer: Layer) -> list[Group]:
    """Return the groups of adapted layers in one decoder layer (worker/optimizations/fused_lora.py)."""
    together = grouped_by(layer.reached(plan.targets), lambda linear: _SIBLINGS.get(linear.name, linear.name))
    return [
        Group(linears[0].reads, linears[0].inputs, sum(linear.outputs for linear in linears), plan.rank * len(linears),
              -(-plan.rank * len(linears) // ALIGNED) * ALIGNED)
        for linears in together.values()
    ]  # fmt: skip


def fused(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes that fused_lora needs in addition to the weights and adapters, in the compute dtype.

    `augmented` uses matrices that are larger than the weights. `separate` keeps three copies for each group: all A
    matrices, all B matrices, and B as a block matrix."""
    if plan.fused == "off":
        return 0.0
    every = [(count, group) for layer, count in model.kinds for group in groups(plan, layer)]
    if plan.fused == "augmented":
        more = sum(count * ((each.outputs + each.columns) * (each.inputs + each.columns) - each.outputs * each.inputs)
                   for count, each in every)  # fmt: skip
        return float(plan.weight * more)
    copies = sum(count * (each.ranks * (each.inputs + each.outputs) + plan.rank * each.outputs)
                 for count, each in every)  # fmt: skip
    return float(plan.compute * copies)


def loading(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the peak bytes during loading. A 16-bit model needs the memory of its weights. While a 4-bit model loads,
    one matrix exists before it is quantized. Later, peft casts the embedding or the head, which then exists in both
    dtypes."""
    resident = weights(model, plan)
    if not plan.quantised or plan.mxfp4 or plan.streamed:
        return resident
    return resident + model.vocab * model.hidden * (plan.weight if plan.upcast > plan.weight else 0)


def adapters(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the adapters. They are float32 (peft), or bfloat16 on a quantized model (trl)."""
    return _adapter_count(model, plan) * plan.adapter


def _adapter_count(model: ModelShape, plan: TrainingPlan) -> int:
    images = vision_adapter_parameters(model.vision, plan) if model.vision else 0
    return adapter_parameters(model, plan.targets, plan.rank) + images


def trained(model: ModelShape, plan: TrainingPlan) -> tuple[float, float]:
    """Return the number of trained parameters, and the mean number of bytes per parameter."""
    if plan.full:
        return model.total, plan.weight
    whole, count = trained_vision(model.vision, plan) if model.vision else 0, _adapter_count(model, plan)
    return count + whole, (count * plan.adapter + whole * plan.upcast) / max(1, count + whole)


def kept_by(model: ModelShape, plan: TrainingPlan) -> tuple[str, float, float, float]:
    """Return the arguments of `optimizer_state` for a plan.

    bitsandbytes does not page the states of matrices with fewer than 100,000 elements (Optimizer8bit.get_state_buffer).
    Adapters of small rank are below this limit."""
    count, width = trained(model, plan)
    sides = [side for layer, _ in model.kinds for linear in layer.linears for side in (linear.inputs, linear.outputs)]
    name, widest = plan.optimizer, plan.rank * max(sides)
    if name == "paged_adamw_8bit" and not plan.full and widest < PAGED_FROM:
        name = "adamw_bnb_8bit"
    return name, count, width, model.parameters["embedding"] if plan.full else 0


def optimizer_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """Return the bytes of the optimizer state in torch's allocator. There are `count` parameters of `width` bytes, and
    `embedding` of them belong to an embedding.

    adamw_torch and adamw_torch_fused keep two moments in the parameter's dtype (torch.optim.AdamW, zeros_like).
    bitsandbytes keeps two moments of 1 byte, with a 4-byte scale per 256 elements (Dettmers et al. 2022). For an
    embedding its moments are float32 (transformers.Trainer.create_optimizer). Paged optimizers keep everything except
    the scales in unified memory, which the driver moves to the host if necessary. torchao's moments have the dtype in
    the optimizer's name (torchao.optim, `_new_buffer`). With 8 bits they are like those of bitsandbytes, also for
    embeddings. sgd has no momentum here, so it keeps nothing."""
    if name == "adamw_bnb_8bit":
        return 8 * embedding + 2 * (1 + 4 / BLOCK_8BIT) * (count - embedding)
    if name == "paged_adamw_8bit":
        return 2 * 4 / BLOCK_8BIT * (count - embedding)
    if name == "adamw_torchao_8bit":
        return 2 * (1 + 4 / BLOCK_8BIT) * count
    if name.startswith("adamw_torchao"):
        return {"fp32": 8.0, "bf16": 4.0}[name.rpartition("_")[2]] * count
    return 0.0 if name == "sgd" else 2 * width * count


def paged_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """Return the bytes that a paged optimizer keeps outside torch's allocator, on the GPU while it has free memory."""
    return 8 * embedding + 2 * (count - embedding) if name.startswith("paged") else 0.0


def optimizer_step(name: str, count: float, width: float) -> float:
    """Return the bytes of the temporary tensors in the optimizer step.

    `adamw_torch` updates all parameters at once (foreach), and its denominator needs as much memory as the parameters
    (torch.optim.adamw, _multi_tensor_adamw). The other optimizers work in place."""
    return count * width if name == "adamw_torch" else 0
