"""Memory that stays between steps: weights, adapters, gradients, optimizer state. All in bytes."""

from dataclasses import dataclass

from ftbench.core.stats import grouped_by
from ftbench.estimate.workload.model import adapter_parameters, trained_vision, vision_adapter_parameters
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer, ModelShape

ALIGNED = 64  # columns that fused_lora widens by (kernels/adapter_products.py)
_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate, up", "up_proj": "gate, up"}
BLOCK = 64  # weights that share an absmax constant (bitsandbytes, Linear4bit)
OUTER = 256  # block constants that share a constant under double quantization (Dettmers et al. 2023, section 3)
PAGED_FROM = 100_000  # elements from which bitsandbytes pages the state of a matrix
BLOCK_8BIT = 256  # elements that share a scale in an 8-bit state (bitsandbytes, blockwise quantisation)


def four_bit(count: float, double_quant: bool) -> float:
    """Return the bytes of 4-bit weights with their block constants.

    n weights take n/2 bytes and have n/64 constants. A constant takes 4 bytes. With double quantization it takes 1
    byte, plus 4 bytes for each 256 constants (Dettmers et al. 2023; 0.5 and 0.127 bits per parameter)."""
    constants = count / BLOCK
    return count / 2 + (constants * (1 + 4 / OUTER) if double_quant else constants * 4)


def weights(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the base model on the GPU.

    The weights have 16 bits. With a 4-bit method, linear layers have 4 bits and the rest has 16 bits, or 32 bits if
    peft's prepare_model_for_kbit_training casts it (dense models; `worker/methods/qlora.py`). unsloth keeps gpt-oss's
    experts as published: the founding study trained the 120b on 96 GB. fp8 keeps two 8-bit layouts of each linear layer
    instead of the 16-bit one (worker/optimizations/fp8.py). Weights in host memory do not count, but their buffers
    do."""
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
    """Return the bytes of the two buffers for streamed layers, each as large as the largest layer."""
    return 2 * max(matrices(layer, plan) for layer, _ in model.kinds)


def matrices(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of a layer's matrices, which weight_offload copies together."""
    linear = sum(each.inputs * each.outputs for each in layer.linears)
    others = layer.expert_matrices + layer.parameters["router"] - layer.router_biases
    four = plan.quantised and not plan.mxfp4
    return (four_bit(linear, plan.double_quant) if four else linear * plan.weight) + others * plan.weight


def fetched_head(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the head that weight_offload copies for the chunked loss."""
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

    `inputs` is the width of their input, `outputs` the sum of their output widths, and `ranks` the sum of their ranks.
    `columns` is this sum rounded up to a multiple of 64: their buffers are padded to it."""

    reads: str
    inputs: int
    outputs: int
    ranks: int
    columns: int


def groups(plan: TrainingPlan, layer: Layer) -> list[Group]:
    """Return the groups of one layer (worker/optimizations/fused_lora.py)."""
    together = grouped_by(layer.reached(plan.targets), lambda linear: _SIBLINGS.get(linear.name, linear.name))
    return [
        Group(linears[0].reads, linears[0].inputs, sum(linear.outputs for linear in linears), plan.rank * len(linears),
              -(-plan.rank * len(linears) // ALIGNED) * ALIGNED)
        for linears in together.values()
    ]  # fmt: skip


def fused(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes that fused_lora holds beyond the weights, in the compute type.

    `augmented` matrices are wider than the weights. `separate` keeps copies of a group's adapters: A of all, B of all,
    and B block by block."""
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
    """Return the peak bytes during loading. In 16 bits these are the weights. In 4 bits these are the quantized
    weights, the rest in 16 bits, and one matrix before it is quantized. Later, the embedding or the head exists in
    both types while peft casts it."""
    resident = weights(model, plan)
    if not plan.quantised or plan.mxfp4 or plan.streamed:
        return resident
    return resident + model.vocab * model.hidden * (plan.weight if plan.upcast > plan.weight else 0)


def adapters(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the adapters: float32 by peft, bfloat16 on a quantized model by trl."""
    return _adapter_count(model, plan) * plan.adapter


def _adapter_count(model: ModelShape, plan: TrainingPlan) -> int:
    images = vision_adapter_parameters(model.vision, plan) if model.vision else 0
    return adapter_parameters(model, plan.targets, plan.rank) + images


def trained(model: ModelShape, plan: TrainingPlan) -> tuple[float, float]:
    """Return the number of trained parameters and the mean bytes of each."""
    if plan.full:
        return model.total, plan.weight
    whole, count = trained_vision(model.vision, plan) if model.vision else 0, _adapter_count(model, plan)
    return count + whole, (count * plan.adapter + whole * plan.upcast) / max(1, count + whole)


def kept_by(model: ModelShape, plan: TrainingPlan) -> tuple[str, float, float, float]:
    """Return the arguments of `optimizer_state`.

    Matrices below 100,000 elements are not paged (bitsandbytes, Optimizer8bit.get_state_buffer), which includes every
    adapter of a small rank."""
    count, width = trained(model, plan)
    sides = [side for layer, _ in model.kinds for linear in layer.linears for side in (linear.inputs, linear.outputs)]
    name, widest = plan.optimizer, plan.rank * max(sides)
    if name == "paged_adamw_8bit" and not plan.full and widest < PAGED_FROM:
        name = "adamw_bnb_8bit"
    return name, count, width, model.parameters["embedding"] if plan.full else 0


def optimizer_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """Return the bytes of the optimizer state for `count` parameters of `width` bytes, `embedding` of them in an
    embedding.

    adamw_torch and its fused form keep two moments in the parameter's type (torch.optim.AdamW, zeros_like).
    bitsandbytes keeps two of 1 byte and a 4-byte scale per 256 (Dettmers et al. 2022), but float32 for an embedding
    (transformers.Trainer.create_optimizer). Paged optimizers keep all but the scales in unified memory, which the
    driver moves to the host if necessary. torchao keeps two moments of the type in its name, 8 bits like bitsandbytes
    but for all matrices (torchao.optim, `_new_buffer`). sgd without momentum keeps nothing."""
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
    """Return the bytes that a paged optimizer keeps outside torch's allocator. They are on the device while there is
    room."""
    return 8 * embedding + 2 * (count - embedding) if name.startswith("paged") else 0.0


def optimizer_step(name: str, count: float, width: float) -> float:
    """Return the temporary bytes of the optimizer's step.

    AdamW without `fused` updates all parameters at once (foreach) and needs one tensor of their size for the
    denominator (torch.optim.adamw, _multi_tensor_adamw). The others work in place."""
    return count * width if name == "adamw_torch" else 0
