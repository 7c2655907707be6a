"""Weights, adapters, gradients, optimizer state: what stays in memory between steps. All in bytes."""

from dataclasses import dataclass

from ftbench.core.grouping import grouped_by
from ftbench.estimate.workload import vision
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.trainable import adapter_parameters
from ftbench.families.shape import Layer, ModelShape

ALIGNED = 64  # columns that fused_lora widens by (kernels/adapter_products.py)
_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate, up", "up_proj": "gate, up"}
BLOCK = 64  # weights that share an absmax constant (bitsandbytes, Linear4bit)
OUTER = 256  # constants that share one of their own under double quantisation (Dettmers et al. 2023, section 3)
PAGED_FROM = 100_000  # elements of a matrix whose state bitsandbytes pages
BLOCK_8BIT = 256  # elements that share a scale in an 8-bit state (bitsandbytes, blockwise quantisation)


def four_bit(count: float, double_quant: bool) -> float:
    """Return the bytes of 4-bit weights with their block constants: n/2, plus n/64 constants of 4 bytes, or, quantised
    once more, of 1 byte and 4 bytes for every 256 (Dettmers et al. 2023; 0.5 and 0.127 bits a parameter)."""
    constants = count / BLOCK
    return count / 2 + (constants * (1 + 4 / OUTER) if double_quant else constants * 4)


def weights(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the base model: 16-bit, or 4-bit linear layers and the rest in 16 bits, or in 32 where peft's
    prepare_model_for_kbit_training casts what is not quantised (dense models; `worker/methods/qlora.py`). unsloth
    keeps gpt-oss's experts as they are published: the founding study trained the 120b on 96 GB. fp8 keeps
    two layouts of 8 bits of each linear layer and drops the 16-bit one (worker/optimizations/fp8.py), fp8_head one of 8
    bits beside the head's. What waits in
    host memory does not count, and the buffers do for which it waits."""
    return _whole(model, plan) - on_host(model, plan) + buffers(model, plan)


def _whole(model: ModelShape, plan: TrainingPlan) -> float:
    if plan.mxfp4 or (plan.unsloth and model.family == "gpt_oss"):
        return model.weight_bytes(plan.weight, mxfp4=True)
    linear = model.linear_parameters
    if not plan.quantised:
        eight = linear if plan.fp8 else 0
        copy = model.vocab * model.hidden if plan.fp8_head else 0
        return (model.total - eight) * plan.weight + 2 * eight + copy + fused(model, plan)
    return four_bit(linear, plan.double_quant) + (model.total - linear) * plan.upcast + fused(model, plan)


def matrices(layer: Layer, plan: TrainingPlan) -> float:
    """Return the bytes of a layer's matrices, which weight_offload copies as one."""
    linear = sum(each.inputs * each.outputs for each in layer.linears)
    others = layer.expert_matrices + layer.parameters["router"] - layer.router_biases + layer.matrices
    four = plan.quantised and not plan.mxfp4
    return (four_bit(linear, plan.double_quant) if four else linear * plan.weight) + others * plan.weight


def fetched_head(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the head that weight_offload copies for the loss over chunks."""
    there = plan.streamed and plan.loss == "chunked"
    return float(model.vocab * model.hidden * plan.upcast) if there else 0.0


def on_host(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the weights that weight_offload keeps in host memory (worker/optimizations/weight_offload.py)."""
    if not plan.streamed:
        return 0.0
    head = fetched_head(model, plan)
    embedding = 0.0 if model.tied else float(model.parameters["embedding"] * plan.upcast)
    return sum(count * matrices(layer, plan) for layer, count in model.kinds) + embedding + head


def buffers(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the two buffers in which layers take turns, each as large as the largest of them."""
    return 2 * max(matrices(layer, plan) for layer, _ in model.kinds) if plan.streamed else 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Adapted layers that fused_lora computes together: their input and its width, their outputs together, the ranks of
    all, and the columns that their buffers are wider by."""

    reads: str
    inputs: int
    outputs: int
    ranks: int
    columns: int


def groups(plan: TrainingPlan, layer: Layer) -> list[Group]:
    """Return the groups of one layer (worker/optimizations/fused_lora.py)."""
    together = grouped_by(layer.reached(plan.targets), lambda linear: _SIBLINGS.get(linear.name, linear.name))
    return [
        Group(
            linears[0].reads,
            linears[0].inputs,
            sum(linear.outputs for linear in linears),
            plan.rank * len(linears),
            -(-plan.rank * len(linears) // ALIGNED) * ALIGNED,
        )
        for linears in together.values()
    ]


def fused(model: ModelShape, plan: TrainingPlan) -> float:
    """Return what fused_lora's matrices hold beyond the weights in them (`augmented`), or its copies of the adapters of
    a group, A of all, B of all, and that block by block (`beside`), in the type of products."""
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
    """Return the most that loading takes: the weights, or for 4 bits the quantised ones, the rest still in 16 bits,
    one matrix before it is quantised, and then, while peft casts it, embedding or head in both types."""
    resident = weights(model, plan)
    if not plan.quantised or plan.mxfp4 or plan.streamed:
        return resident
    return resident + model.vocab * model.hidden * (plan.weight if plan.upcast > plan.weight else 0)


def adapters(model: ModelShape, plan: TrainingPlan) -> float:
    """Return the bytes of the adapters: float32 by peft, of a quantised model bfloat16 by trl."""
    return _adapter_count(model, plan) * plan.adapter


def _adapter_count(model: ModelShape, plan: TrainingPlan) -> int:
    beside = vision.adapter_parameters(model.vision, plan) if model.vision else 0
    return adapter_parameters(model, plan.targets, plan.rank) + beside


def trained(model: ModelShape, plan: TrainingPlan) -> tuple[float, float]:
    """Return how many parameters are trained, and the bytes of each, their mean where adapters and whole parts are."""
    if plan.full:
        return model.total, plan.weight
    whole, count = vision.trained_whole(model.vision, plan) if model.vision else 0, _adapter_count(model, plan)
    return count + whole, (count * plan.adapter + whole * plan.upcast) / max(1, count + whole)


def kept_by(model: ModelShape, plan: TrainingPlan) -> tuple[str, float, float, float]:
    """Return the arguments of `optimizer_state`. Matrices of fewer than 100,000 elements are not paged
    (bitsandbytes, Optimizer8bit.get_state_buffer), which is every adapter of a small rank."""
    count, width = trained(model, plan)
    sides = [side for layer, _ in model.kinds for linear in layer.linears for side in (linear.inputs, linear.outputs)]
    name, widest = plan.optimizer, plan.rank * max(sides)
    if name == "paged_adamw_8bit" and not plan.full and widest < PAGED_FROM:
        name = "adamw_bnb_8bit"
    return name, count, width, model.parameters["embedding"] if plan.full else 0


def optimizer_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """Return what the optimizer keeps for `count` parameters of `width` bytes, `embedding` of them in an embedding.

    adamw_torch and its fused form keep two moments in the parameter's type (torch.optim.AdamW, zeros_like);
    bitsandbytes keeps two of 1 byte and a 4-byte scale for every 256 (Dettmers et al. 2022), but those of an embedding
    in float32 (transformers.Trainer.create_optimizer); paged ones but for their scales in unified memory that the
    driver moves to the host when it must; torchao keeps two of the type in its name, 8 bits as bitsandbytes does but of
    every matrix (torchao.optim, `_new_buffer`); sgd without momentum keeps nothing.
    """
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
    """Return what a paged optimizer keeps outside torch's allocator, on the device as long as there is room."""
    return 8 * embedding + 2 * (count - embedding) if name.startswith("paged") else 0.0


def optimizer_step(name: str, count: float, width: float) -> float:
    """Return what the step itself takes: AdamW without `fused` works on all parameters at once (foreach) and needs
    one tensor of their size for the denominator (torch.optim.adamw, _multi_tensor_adamw); the others work in place."""
    return count * width if name == "adamw_torch" else 0
