"""Set up and verify the optimizer of a run. Most optimizers come from transformers. torchao's are added here."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftbench.spec.experiment import Experiment
from ftbench.worker.measure.effective_config import innermost
from ftbench.worker.model.parts import plain_tensors

# Module and class of the optimizer for each value of train.optimizer.
OPTIMIZERS = {
    "adamw_torch": ("torch.optim", "AdamW"),
    "adamw_torch_fused": ("torch.optim", "AdamW"),
    "adamw_bnb_8bit": ("bitsandbytes", "AdamW"),
    "paged_adamw_8bit": ("bitsandbytes", "AdamW"),
    "adamw_torchao_fp32": ("torchao.optim", "AdamW"),
    "adamw_torchao_bf16": ("torchao.optim", "AdamW"),
    "adamw_torchao_8bit": ("torchao.optim", "AdamW8bit"),
    "sgd": ("torch.optim", "SGD"),
}
# Dtype and bits of the state, by the suffix of the optimizer's name.
STATES = {"8bit": (torch.uint8, 8), "fp32": (torch.float32, 32), "bf16": (torch.bfloat16, 16)}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return trainer arguments for a torchao optimizer, because transformers cannot select these optimizers by name."""
    if "torchao" not in spec.train.optimizer:
        return {}
    options = {"lr": spec.train.learning_rate, "bf16_stochastic_round": True}
    return {"optimizer_cls_and_kwargs": (_torchao(spec.train.optimizer), options)}


def _torchao(name: str) -> Any:
    from torchao import optim

    if name == "adamw_torchao_8bit":
        return type("AdamW8bit", (_SteppedByKernel, optim.AdamW8bit), {"__module__": optim.__name__})
    dtype = STATES[name.rpartition("_")[2]][0]

    def new_buffer(self: Any, p: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(p, dtype=dtype)

    attributes = {"_new_buffer": new_buffer, "__module__": optim.__name__}
    return type("AdamW", (_SteppedByKernel, optim._AdamW), attributes)


class _SteppedByKernel:
    """Mixin that updates each parameter with one kernel. torchao's own step takes 0.5 ms of host time per parameter.

    `factor` is a scalar on the device. The kernel multiplies the gradients by `factor` to clip them. The learning rate
    is a tensor that stays on the host. accelerate would move it to the GPU, where every read would synchronize.
    """

    factor: torch.Tensor | None = None
    by_kernel: bool | None = None

    def load_state_dict(self: Any, state: Any) -> None:
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict(state)  # type: ignore[misc]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate.fill_(float(group["lr"]))

    def is_by_kernel(self: Any) -> bool:
        """Return whether the kernel supports all parameters. With FSDP, check only this rank's shards."""
        if self.by_kernel is None:  # `step` may run once per parameter
            plain = all(_is_plain(p) for group in self.param_groups for p in group["params"])
            self.by_kernel = plain and self.bf16_stochastic_round
        return bool(self.by_kernel)

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        if closure is not None or not self.is_by_kernel():
            return super().step(closure)  # type: ignore[misc]
        from ftbench.kernels.adamw import adamw_step  # needs triton

        self.defaults["fused"] = True
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.factor is None:
                    self.factor = torch.ones((), device=p.device)
                state = self.state[p]
                if not state:
                    moments = self._new_buffer(p, True), self._new_buffer(p, False)
                    state |= {"step": torch.tensor(0.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
                state["step"] += 1
                seed = int(torch.randint(1 << 31, ()))
                moments = own_share(state["exp_avg"]), own_share(state["exp_avg_sq"])
                given = (own_share(p), own_share(p.grad).contiguous(), *moments, self.factor)
                adamw_step(*given, int(state["step"]), seed, group)
        return None


def own_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor. Return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_plain(parameter: torch.Tensor) -> bool:
    known = type(parameter) in (torch.nn.Parameter, DTensor)
    return known and own_share(parameter).is_contiguous() and parameter.device.type == "cuda"


def attach(loop: Any, spec: Experiment) -> None:
    """Clip gradients inside the optimizer kernel instead of in a separate pass, if the optimizer has this kernel."""
    original = loop.accelerator.clip_grad_norm_

    def clip_grad_norm(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        stepping = innermost(loop.optimizer)
        if not stepping.is_by_kernel():
            return original(parameters, max_norm, *args, **kwargs)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        stepping.factor = (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
        return norm

    cast = spec.train.precision == "fp16" or spec.launch.gpus > 1  # gradients are scaled or sharded
    kind = arguments(spec).get("optimizer_cls_and_kwargs", (object,))[0]
    if issubclass(kind, _SteppedByKernel) and not cast:
        loop.accelerator.clip_grad_norm_ = clip_grad_norm


def verify(optimizer: Any, spec: Experiment) -> list[str]:
    """Return a message for each optimizer setting that was not applied. Call this after the first step."""
    optimizer, setting, problems = innermost(optimizer), spec.train.optimizer, []
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    module, kind = OPTIMIZERS[setting]
    if not name.startswith(module) or not name.endswith(kind):
        problems.append(f"train.optimizer is {setting} and the trainer uses {name}")
    if setting == "adamw_torch_fused" and not optimizer.defaults.get("fused"):
        problems.append(f"train.optimizer is adamw_torch_fused and {name} is not fused")
    if "torchao" in setting and not optimizer.bf16_stochastic_round:
        problems.append(f"train.optimizer is {setting} and {name} does not use stochastic rounding")
    wanted, bits = STATES.get(setting.rpartition("_")[2], (None, 0))
    values = (value for state in optimizer.state.values() for value in state.values())
    dtypes = {tensor.dtype for value in values for tensor in plain_tensors(value) if tensor.numel() > 1}
    if wanted and wanted not in dtypes:
        problems.append(
            f"train.optimizer is {setting} and {name} has no {bits}-bit state "
            "(tensors of fewer than 4,096 elements are never in 8 bits)"
        )
    return problems
