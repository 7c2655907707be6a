"""Compute the bytes of tensors that stay between steps: weights, adapters and optimizer state."""

from dataclasses import dataclass

from ftbench.core.stats import grouped_by
from ftbench.estimate.workload.model import adapter_parameters, trained_vision, vision_adapter_parameters
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.families.shape import Layer, ModelShape

ALIGNED = 64  # fused_lora pads its buffers to a multiple of this number of columns (kernels/adapter_products.py)
_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate, up", "up_proj": "gate, up"}
BLOCK = 64  # weights that share an absmax constant (bitsandbytes, Linear4bit)
OUTER = 256  # absmax constants that share a second constant with double quantization (Dettmers et al. 2023, section 3)
PAGED_FROM = 100_000  # bitsandbytes pages the state of matrices with at least this many elements
BLOCK_8BIT = 256  # elements that share a scale in an 8-bit state (bitsandbytes, blockwise quantisation)


def four_bit(count: float, double_quant: bool) -> float:
    """Return the bytes of `count` 4-bit weights and of their absmax constants (Dettmers et al. 2023).

    Each block of 64 weights has one constant of 4 bytes, which adds 0.5 bits per weight. With double quantization, a
    constant has 1 byte, and 256 constants share 4 more bytes. This adds 0.127 bits per weight."""
    constants = count / BLOCK
    return count / 2 + (constants * (1 + 4 / OUTER) if double_quant else constants * 4)


def weights(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the base model on the GPU.

    Without quantization, each weight has `plan.weight` bytes. With a 4-bit method, linear layers have 4 bits per
    weight. The other weights have 16 bits. In dense models, peft's prepare_model_for_kbit_training casts the other
    weights to 32 bits (worker/methods/qlora.py). unsloth keeps the experts of gpt-oss in MXFP4. fp8 replaces the 16-bit
    matrix of each frozen linear layer by two 8-bit copies with different layouts (worker/optimizations/fp8.py). With
    weight_offload, the GPU buffers count instead of the weights in host memory."""
    linear = model.linear_parameters
    if plan.packed_experts:
        total = model.weight_bytes(plan.weight, mxfp4=True)
    elif plan.quantised:
        total = four_bit(linear, plan.double_quant) + (model.total - linear) * plan.upcast + fused(model, plan)
    else:
        eight = linear if plan.fp8 and not plan.full else 0
        total = (model.total - eight) * plan.weight + 2 * eight + fused(model, plan)
    return total - on_host(model, plan) + buffers(model, plan) if plan.streamed else total


def buffers(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of weight_offload's two buffers on the GPU. Each buffer has the size of the largest layer."""
    return 2 * max(matrices(layer, plan) for layer, _ in model.kinds)


def matrices(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of the matrices of one layer, which weight_offload copies to the GPU together."""
    linear = sum(each.inputs * each.outputs for each in layer.linears)
    others = layer.expert_matrices + layer.parameters["router"] - layer.router_biases
    four = plan.quantised and not plan.mxfp4
    return (four_bit(linear, plan.double_quant) if four else linear * plan.weight) + others * plan.weight


def fetched_head(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the GPU bytes of the LM head if weight_offload copies the head to the GPU for the chunked loss."""
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
    """Linear layers with adapters and the same input, such as q, k and v. fused_lora computes these layers together.

    `inputs` is the width of the input. `outputs` is the sum of the output widths, and `ranks` the sum of the LoRA
    ranks. `columns` is `ranks` rounded up to a multiple of 64: the extra columns of fused_lora's buffers."""

    reads: str
    inputs: int
    outputs: int
    ranks: int
    columns: int


def groups(plan: TrainingPlan, layer: Layer) -> list[Group]:
    """Return fused_lora's groups of linear layers in one decoder layer (worker/optimizations/fused_lora.py)."""
    together = grouped_by(layer.reached(plan.targets), lambda linear: _SIBLINGS.get(linear.name, linear.name))
    return [
        Group(linears[0].reads, linears[0].inputs, sum(linear.outputs for linear in linears), plan.rank * len(linears),
              -(-plan.rank * len(linears) // ALIGNED) * ALIGNED)
        for linears in together.values()
    ]  # fmt: skip


def fused(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes that fused_lora needs in addition to the weights and adapters.

    `augmented` adds `Group.columns` rows and columns to the weight of each group, for the adapters. With 4-bit weights,
    these rows and columns are two other tensors. `separate` stores three tensors per group: all A matrices, all B
    matrices, and the B matrices as one block-diagonal matrix."""
    if plan.fused == "off":
        return 0.0
    every = [(count, group) for layer, count in model.kinds for group in groups(plan, layer)]
    if plan.fused == "augmented" and plan.quantised and not plan.mxfp4:
        return float(plan.compute * sum(count * each.columns * (each.inputs + each.outputs) for count, each in every))
    if plan.fused == "augmented":
        more = sum(count * ((each.outputs + each.columns) * (each.inputs + each.columns) - each.outputs * each.inputs)
                   for count, each in every)  # fmt: skip
        return float(plan.weight * more)
    copies = sum(count * (each.ranks * (each.inputs + each.outputs) + plan.rank * each.outputs)
                 for count, each in every)  # fmt: skip
    return float(plan.compute * copies)


def loading(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the peak bytes during the loading of the model.

    A 16-bit model needs the memory of its weights. A 4-bit model needs more memory while peft casts the embedding or
    the head to float32. During the cast, the 16-bit tensor and the float32 tensor exist together."""
    resident = weights(model, plan)
    if not plan.quantised or plan.mxfp4 or plan.streamed:
        return resident
    return resident + model.vocab * model.hidden * (plan.weight if plan.upcast > plan.weight else 0)


def adapters(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the adapters, which are float32 (peft), or bfloat16 on a quantized model (trl)."""
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
    """Return the arguments of `optimizer_state`: (optimizer, parameters, bytes per parameter, embedding parameters).

    bitsandbytes does not page the states of matrices with fewer than 100,000 elements (Optimizer8bit.get_state_buffer).
    Adapters of small rank are below this limit."""
    count, width = trained(model, plan)
    sides = [side for layer, _ in model.kinds for linear in layer.linears for side in (linear.inputs, linear.outputs)]
    name, widest = plan.optimizer, plan.rank * max(sides)
    if name == "paged_adamw_8bit" and not plan.full and widest < PAGED_FROM:
        name = "adamw_bnb_8bit"
    return name, count, width, model.parameters["embedding"] if plan.full else 0


def optimizer_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """Return the bytes of the optimizer state in torch's allocator.

    `count` is the number of trained parameters, `width` is the number of bytes per parameter, and `embedding` is the
    number of trained embedding parameters. adamw_torch and adamw_torch_fused keep two moments in the dtype of the
    parameters (torch.optim.AdamW, zeros_like). bitsandbytes keeps two moments of 1 byte per parameter, and a 4-byte
    scale per 256 elements (Dettmers et al. 2022). Its moments for embeddings are float32
    (transformers.Trainer.create_optimizer). Paged optimizers keep moments in unified memory outside the allocator, so
    only the scales count. torchao's moments have the dtype in the optimizer's name (torchao.optim, `_new_buffer`).
    torchao's 8-bit moments need the same bytes as those of bitsandbytes, also for embeddings. sgd without momentum
    keeps no state."""
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
    """Return the bytes of a paged optimizer's state, outside torch's allocator. The GPU holds it if memory is free."""
    return 8 * embedding + 2 * (count - embedding) if name.startswith("paged") else 0.0


def optimizer_step(name: str, count: float, width: float) -> float:
    """Return the bytes of the temporary tensors in the optimizer step.

    `adamw_torch` updates all parameters together (foreach). The temporary denominators of the update have the size of
    all parameters (torch.optim.adamw, _multi_tensor_adamw). The other optimizers work in place."""
    return count * width if name == "adamw_torch" else 0
