"""Weights, adapters, gradients, optimizer state: what stays in memory between steps. All in bytes."""

from __future__ import annotations

from ftbench.estimate.memory.model import ModelShape
from ftbench.estimate.memory.recipe import Recipe

ALIGNED = 64  # columns that fused_lora widens by (worker/adapter_products.py)
BLOCK = 64  # weights that share an absmax constant (bitsandbytes, Linear4bit)
OUTER = 256  # constants that share one of their own under double quantisation (Dettmers et al. 2023, section 3)
PAGED_FROM = 100_000  # elements of a matrix whose state bitsandbytes pages
BLOCK_8BIT = 256  # elements that share a scale in an 8-bit state (bitsandbytes, blockwise quantisation)


def plain(count: float, width: float) -> float:
    """`count` parameters of `width` bytes."""
    return count * width


def four_bit(count: float, double_quant: bool) -> float:
    """4-bit weights with their block constants: n/2, plus n/64 constants of 4 bytes, or, quantised once more, of 1 byte
    and 4 bytes for every 256 of them (Dettmers et al. 2023; 0.5 and 0.127 bits a parameter)."""
    constants = count / BLOCK
    return count / 2 + (constants * (1 + 4 / OUTER) if double_quant else constants * 4)


def mxfp4(count: float) -> float:
    """Weights as gpt-oss publishes its experts: 4 bits and a byte of scale for 32 (OCP Microscaling 1.0)."""
    return count / 2 + count / 32


def linear_count(model: ModelShape) -> int:
    """Parameters that bitsandbytes quantises: those of `nn.Linear` within the layers. Embedding, head, norms, routers
    and the fused three-dimensional experts of transformers 5 are none, nor are biases and attention sinks."""
    biases = {"qwen2": model.query + 2 * model.key, "gpt_oss": model.query + 2 * model.key + model.hidden + model.heads}
    attention = model.parameters["attention"] - model.layers * biases.get(model.family, 0)
    return attention + model.parameters["mlp"]


def weights(model: ModelShape, recipe: Recipe) -> float:
    """The base model: 16-bit, or 4-bit linear layers and the rest in 16 bits, or in 32 where peft's
    prepare_model_for_kbit_training casts what is not quantised (dense models; `worker/methods/qlora.py`). unsloth
    keeps gpt-oss's experts as they are published: the founding study trained the 120b on 96 GB. fp8 keeps
    two layouts of 8 bits of each linear layer and drops the 16-bit one (worker/optimizations/fp8.py)."""
    if recipe.mxfp4 or (recipe.unsloth and model.family == "gpt_oss"):
        matrices = expert_matrices(model)
        return mxfp4(matrices) + plain(model.total - matrices, recipe.weight)
    if not recipe.quantised:
        eight = linear_count(model) if recipe.fp8 else 0
        return plain(model.total - eight, recipe.weight) + 2 * eight + augmented(model, recipe)
    linear = linear_count(model)
    return four_bit(linear, recipe.double_quant) + plain(model.total - linear, recipe.upcast)


def expert_matrices(model: ModelShape) -> int:
    """Parameters of the experts' matrices; gpt_oss's biases are none."""
    return model.layers * model.experts * 3 * model.hidden * model.inner


def groups(recipe: Recipe, model: ModelShape) -> list[tuple[int, int, int]]:
    """The adapted layers that fused_lora computes together: input, outputs together, columns that their buffers are
    wider by (worker/optimizations/fused_lora.py)."""
    h, q, k, i = model.hidden, model.query, model.key, model.inner
    together: list[tuple[int, dict[str, int]]] = [(h, {"q": q, "k": k, "v": k}), (q, {"o": h})]
    if not model.experts:
        together += [(h, {"gate": i, "up": i}), (i, {"down": h})]
    found = []
    for width, layers in together:
        outs = [out for name, out in layers.items() if name in recipe.targets]
        if outs:
            found.append((width, sum(outs), -(-recipe.rank * len(outs) // ALIGNED) * ALIGNED))
    return found


def augmented(model: ModelShape, recipe: Recipe) -> float:
    """What fused_lora's matrices hold beyond the weights in them."""
    if recipe.fused != "augmented":
        return 0.0
    more = sum((out + room) * (width + room) - out * width for width, out, room in groups(recipe, model))
    return float(model.layers * recipe.weight * more)


def loading(model: ModelShape, recipe: Recipe) -> float:
    """The most that loading takes: the weights, or for 4 bits the quantised ones, the rest still in 16 bits, one matrix
    before it is quantised, and then, while peft casts it, embedding or head in both types."""
    resident = weights(model, recipe)
    if not recipe.quantised or recipe.mxfp4:
        return resident
    return resident + model.vocab * model.hidden * (recipe.weight if recipe.upcast > recipe.weight else 0)


def adapter_count(model: ModelShape, recipe: Recipe) -> int:
    """Trained parameters of LoRA: r (in + out) for each targeted matrix (Hu et al. 2021). On fused experts peft gives
    the joint gate and up matrix twice the rank."""
    h, q, k, i, r = model.hidden, model.query, model.key, model.inner, recipe.rank
    sizes = {"q": h + q, "k": h + k, "v": h + k, "o": q + h}
    if not model.experts:
        sizes |= {"gate": h + i, "up": h + i, "down": i + h}
    dense = sum(size for name, size in sizes.items() if name in recipe.targets)
    experts = model.experts * (2 * (h + 2 * i) + (i + h)) if "experts" in recipe.targets else 0
    return model.layers * r * (dense + experts)


def adapters(model: ModelShape, recipe: Recipe) -> float:
    """peft keeps adapters of a 16-bit model in float32; trl casts those of a quantised one to bfloat16."""
    return plain(adapter_count(model, recipe), recipe.adapter)


def trained(model: ModelShape, recipe: Recipe) -> tuple[float, int]:
    """How many parameters are trained, and the bytes of each."""
    if recipe.full:
        return model.total, recipe.weight
    return adapter_count(model, recipe), recipe.adapter


def gradients(count: float, width: float) -> float:
    """A gradient has the type of its parameter (torch.autograd)."""
    return count * width


def kept_by(model: ModelShape, recipe: Recipe) -> tuple[str, float, float, float]:
    """The arguments of `optimizer_state`. Matrices of fewer than 100,000 elements are not paged (bitsandbytes,
    Optimizer8bit.get_state_buffer), which is every adapter of a small rank."""
    count, width = trained(model, recipe)
    name, widest = recipe.optimizer, recipe.rank * max(model.hidden, model.query, model.inner)
    if name == "paged_adamw_8bit" and not recipe.full and widest < PAGED_FROM:
        name = "adamw_bnb_8bit"
    return name, count, width, model.parameters["embedding"] if recipe.full else 0


def optimizer_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """What the optimizer keeps for `count` parameters of `width` bytes, `embedding` of them in an embedding.

    adamw_torch and its fused form keep two moments in the parameter's type (torch.optim.AdamW, zeros_like);
    bitsandbytes keeps two of 1 byte and a 4-byte scale for every 256 (Dettmers et al. 2022), but those of an embedding
    in float32 (transformers.Trainer.create_optimizer); paged ones but for their scales in unified memory that the
    driver moves to the host when it must; sgd without momentum keeps nothing.
    """
    if name == "adamw_bnb_8bit":
        return 8 * embedding + 2 * (1 + 4 / BLOCK_8BIT) * (count - embedding)
    if name == "paged_adamw_8bit":
        return 2 * 4 / BLOCK_8BIT * (count - embedding)
    return 0.0 if name == "sgd" else 2 * width * count


def paged_state(name: str, count: float, width: float, embedding: float = 0) -> float:
    """What a paged optimizer keeps outside torch's allocator, on the device as long as there is room."""
    return 8 * embedding + 2 * (count - embedding) if name.startswith("paged") else 0.0


def optimizer_step(name: str, count: float, width: float) -> float:
    """What the step itself takes: AdamW without `fused` works on all parameters at once (foreach) and needs one tensor
    of their size for the denominator (torch.optim.adamw, _multi_tensor_adamw); the others work in place."""
    return count * width if name == "adamw_torch" else 0
