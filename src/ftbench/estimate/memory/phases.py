"""The moments of a run at which memory may peak, and the tensors alive at each: the peak is the largest, not the
sum."""

from __future__ import annotations

from dataclasses import dataclass

from ftbench.estimate.memory import layer, loss, share, weights
from ftbench.estimate.memory.model import ModelShape
from ftbench.estimate.memory.recipe import Batch, Recipe

Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run on one of `gpus` GPUs. `accumulates` says that gradients wait for further forward passes; `workspace` is
    what libraries keep in torch's allocator, in bytes."""

    model: ModelShape
    recipe: Recipe
    batch: Batch
    accumulates: bool = False
    gpus: int = 1
    strategy: str = "none"
    workspace: float = 0.0


def resident(plan: Plan) -> Parts:
    """What stays from step to step: weights, adapters, optimizer state, workspaces of libraries."""
    part = share.share(plan.strategy, plan.gpus)
    count, width = weights.trained(plan.model, plan.recipe)
    base = weights.weights(plan.model, plan.recipe) * part.weights
    if part.gathered:
        largest = plan.model.vocab * plan.model.hidden * plan.recipe.compute
        base += share.gathered(plan.model.layer_parameters * plan.recipe.compute, largest)
    trained = count * width
    kept = layer.dequantised(plan.model, plan.recipe) if plan.recipe.unsloth else 0
    kept += layer.checkpoint_buffers(plan.model, plan.recipe, plan.batch)
    return {
        "weights": base,
        "adapters": weights.adapters(plan.model, plan.recipe) * part.weights,
        "optimizer state": weights.optimizer_state(*weights.kept_by(plan.model, plan.recipe)) * part.optimizer,
        "gradients": trained * part.gradients if plan.accumulates else 0.0,
        "workspace": plan.workspace + kept + share.ddp_buckets(plan.strategy, plan.gpus, trained),
    }


def phases(plan: Plan) -> dict[str, Parts]:
    """Phase → bytes by part. Parts of a phase are alive together."""
    base = resident(plan)
    model, recipe, batch = plan.model, plan.recipe, plan.batch
    part = share.share(plan.strategy, plan.gpus)
    kept, remade = _layers(model, recipe)
    one, inputs = layer.saved(model, recipe, batch), layer.checkpoint(model, recipe, batch)
    stays = 0.0
    if recipe.offload:
        kept, remade, inputs = 1, 0, 0.0
        stays = (model.layers - 1) * layer.saved_twice(model, recipe) * batch.tokens
    if recipe.checkpointing == "offload":  # one on its way out or in use, and the next
        remade = min(2, remade)
    acts, marks = kept * one - _unsaved(model, recipe, batch) + stays, remade * inputs
    hump = layer.hump(model, recipe, batch)
    cast = autocast_weights(model, recipe)
    again = one - _shared_input(model, recipe, batch) if not kept else 0.0
    stream = 2 * recipe.stream * model.hidden * batch.tokens if kept else 0
    count, width = weights.trained(model, recipe)
    grads = weights.gradients(count, width) * part.gradients
    top = (
        loss.head_gradient(model, recipe, batch) / (2 if recipe.loss == "chunked" else 3)
        if not plan.accumulates
        else 0.0
    )
    held = {"activations": acts, "checkpoints": marks, "cast weights": cast}
    tail = loss.tail(model, recipe, batch)
    final = max(loss.loss_hump(model, recipe, batch), loss.final_norm_hump(model, recipe, batch))
    first = {"activations": one if kept else 0.0, "checkpoints": inputs if remade else 0.0, "cast weights": cast}
    grown = {} if plan.accumulates else {"gradients": grads * _grown(model, recipe)}
    twice = loss.tied_gradients(model, recipe) * part.gradients
    gradients = {"gradients": base["gradients"] + top}
    away = (one - layer.saved_twice(model, recipe) * batch.tokens) if recipe.offload else 0.0  # the last layer's too
    return {
        "load": {"weights": weights.loading(model, recipe) * part.weights},
        "forward": base | held | {"one layer": hump + stream if kept else hump},
        "loss": base | held | {"activations": acts - away, "hidden states": tail, "logits": final},
        "backward, last layer": base | held | gradients | {"one layer": again + hump},
        "backward, first layer": base | first | grown | {"one layer": again + hump},
        "backward, embedding": base | {"gradients": grads, "cast weights": cast, "tied gradients": twice},
        "optimizer step": base
        | {"gradients": grads, "one step": weights.optimizer_step(recipe.optimizer, count, width) * part.optimizer},
    }


def _grown(model: ModelShape, recipe: Recipe) -> float:
    """The part of all gradients that is there as the backward pass enters the first layer: not yet the embedding's, nor
    those of that layer but for the last matrix of its MLP."""
    if not recipe.full:
        return 1.0
    left = model.layer_parameters * 2 / 3 + (0 if model.tied else model.parameters["embedding"])
    return 1 - left / model.total


def _layers(model: ModelShape, recipe: Recipe) -> tuple[int, int]:
    """How many layers keep their activations, and how many make them again (selective: every second keeps)."""
    if recipe.checkpointing == "off":
        return model.layers, 0
    kept = model.layers // 2 if recipe.checkpointing == "selective" else 0
    return kept, model.layers - kept


def _unsaved(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """The first norm of a model with a frozen embedding saves nothing: nobody asks for its gradient."""
    if recipe.full or recipe.checkpointing != "off" or recipe.compiled:
        return 0.0
    return layer.norms(model, recipe) / 2 * batch.tokens


def _shared_input(model: ModelShape, recipe: Recipe, batch: Batch) -> float:
    """A float32 stream is what the first norm saves: made again, it is the checkpoint itself."""
    return float(recipe.stream * model.hidden * batch.tokens) if recipe.stream == layer.FLOAT else 0.0


def autocast_weights(model: ModelShape, recipe: Recipe) -> float:
    """Trained float32 weights are cast once for a step (torch.autocast's cache) and saved so for the backward pass."""
    if not (recipe.autocast and recipe.full and recipe.weight > recipe.compute):
        return 0.0
    return float((model.total - model.parameters["embedding"] - model.parameters["norm"]) * recipe.compute)


def peak(found: dict[str, Parts]) -> tuple[str, float]:
    """The phase that needs most, and how many bytes."""
    return max(((name, sum(parts.values())) for name, parts in found.items()), key=lambda pair: pair[1])
