"""Damage a training run on purpose, to test whether `ftbench parity` detects the damage. `spec/experiment.py` describes
the values of `measure.control`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from ftbench.errors import NotAppliedError
from ftbench.spec.experiment import Experiment
from ftbench.worker.measure.levels import trained

LOST, NOISE = 0.01, 0.05  # share of gradient elements set to 0; noise in standard deviations of a weight


def apply(loop: Any, spec: Experiment) -> dict[str, Any]:
    """Damage the live trainer, and return the entry for applied.json. Raise NotAppliedError if nothing was damaged."""
    name, _, factor = spec.measure.control.partition("_x")
    makers = {
        "learning_rate_0": partial(_rate, factor=0.0),
        "learning_rate": partial(_rate, factor=float(factor or 1)),
        "reversed_gradient": partial(_change_gradients, change=torch.neg),
        "projection_frozen": partial(_change_gradients, change=torch.zeros_like, where=".v_proj."),
        "layer_frozen": partial(_change_gradients, change=torch.zeros_like, where=".layers.1."),
        "lora_a_frozen": partial(_change_gradients, change=torch.zeros_like, where=".lora_A."),
        "gradient_entries_lost": partial(
            _change_gradients, change=lambda g: g * (torch.rand_like(g) >= LOST), where=".layers.1."
        ),
        "layer_gradient_reversed": partial(_change_gradients, change=torch.neg, where=".layers.1."),
        "gradient_noise": partial(_change_gradients, change=lambda g: g + torch.randn_like(g) * g.pow(2).mean() ** 0.5),
        "lora_scale": partial(_scale, factor=float(factor or 1)),
        "frozen_weights_noise": _noise,
        "positions_zero": partial(_hook, match=lambda n, m: n.endswith("rotary_emb"), change=_no_rotation),
        "attention_off": partial(_hook, match=lambda n, m: n.endswith(("self_attn", "attention")), change=_nothing),
        "loss_over_padding": partial(_collate, change=partial(_carry_loss, mask=0)),
        "prompts_not_masked": partial(_collate, change=partial(_carry_loss, mask=1)),
        "packed_samples_see_each_other": partial(_collate, change=_one_sample),
        "accumulation_divisor": _mean_of_means,
    }
    if not (count := makers[name](loop)):
        raise NotAppliedError(f"measure.control {spec.measure.control} found nothing to damage")
    return {"name": spec.measure.control, "places": count}


class _BeforeStep(TrainerCallback):
    """Calls a function with the optimizer before each optimizer step."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._change(kwargs["optimizer"])


def _rate(loop: Any, factor: float) -> int:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # not cumulative: the scheduler sets `lr` again after each step

    loop.add_callback(_BeforeStep(change))
    return 1


def _change_gradients(loop: Any, change: Callable[[torch.Tensor], torch.Tensor], where: str = "") -> int:
    parameters = [p for name, p in trained(loop.model).items() if where in name]

    def change_all(optimizer: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(change(parameter.grad))

    loop.add_callback(_BeforeStep(change_all))
    return len(parameters)


def _scale(loop: Any, factor: float) -> int:
    layers = [module for module in loop.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for layer in layers:
        layer.scaling = {name: value * factor for name, value in layer.scaling.items()}
    return len(layers)


@torch.no_grad()
def _noise(loop: Any) -> int:
    frozen = [p for p in loop.model.parameters() if not p.requires_grad and p.ndim > 1 and p.is_floating_point()]
    for parameter in frozen:
        parameter.add_(torch.randn_like(parameter) * parameter.float().std().to(parameter.dtype) * NOISE)
    return len(frozen)


def _hook(loop: Any, match: Callable[[str, Any], bool], change: Callable[..., Any]) -> int:
    modules = [module for name, module in loop.model.named_modules() if match(name, module)]
    for module in modules:
        module.register_forward_hook(change)
    return len(modules)


def _no_rotation(module: Any, inputs: Any, output: Any) -> Any:
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def _nothing(module: Any, inputs: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:])


def _collate(loop: Any, change: Callable[[dict[str, Any]], None]) -> int:
    collate = loop.data_collator

    def changed(rows: Any) -> dict[str, Any]:
        batch: dict[str, Any] = collate(rows)
        change(batch)
        return batch

    loop.data_collator = changed
    return 1


def _carry_loss(batch: dict[str, Any], mask: int) -> None:
    batch["labels"] = torch.where(batch["attention_mask"] == mask, batch["input_ids"], batch["labels"])


def _one_sample(batch: dict[str, Any]) -> None:
    """Give the positions of a packed row the values 0, 1, 2, ... Attention then treats the row as one sample."""
    tokens = batch["input_ids"].shape[1]
    batch["position_ids"] = torch.arange(tokens)[None]
    if "cu_seq_lens_q" in batch:
        bounds = batch["cu_seq_lens_q"][[0, -1]]
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": tokens, "max_length_k": tokens}


def _mean_of_means(loop: Any) -> int:
    """Divide the loss of each micro-batch by the label tokens of this micro-batch, not by those of the step."""
    gather = loop.get_batch_samples
    loop.get_batch_samples = lambda *args, **kwargs: (gather(*args, **kwargs)[0], None)
    return 1
