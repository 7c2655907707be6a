"""Train with Megatron-core. The training loop follows Megatron's examples.

The model uses Megatron's local layers, which do not need Transformer Engine. ftbench does not change Megatron's
schedule, optimizer or gradient buffers.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, get_scheduler

from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.device import device
from ftbench.worker.frameworks import megatron_model, own_loop
from ftbench.worker.measure import effective_config
from ftbench.worker.measure.batch_count import BatchCount
from ftbench.worker.training_run import TrainingRun, recorder_of

_OPTIMIZERS = {"adamw_torch": "adam", "sgd": "sgd"}


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return the settings under the names of Megatron's command-line options.

    The optimizer updates weights in `model.dtype`, as in trl. bfloat16 weights are updated directly. For float32
    weights and bf16 matrix products, Megatron stores bfloat16 weights, and updates float32 main copies of them.
    """
    train, launch = spec.train, spec.launch
    main_copies = spec.model.dtype == "float32" and train.precision == "bf16"
    return {
        "load": model, "params_dtype": "bfloat16" if main_copies else spec.model.dtype, "bf16": main_copies,
        "accumulate_allreduce_grads_in_fp32": main_copies, "optimizer": _OPTIMIZERS[train.optimizer],
        "lr": train.learning_rate, "lr_decay_style": train.lr_scheduler, "lr_warmup_iters": train.warmup_steps,
        "weight_decay": train.weight_decay, "clip_grad": train.max_grad_norm, "train_iters": train.max_steps,
        "micro_batch_size": train.batch_size // (launch.micro_batches or 1), "global_batch_size": spec.global_batch,
        "seed": train.seed, "recompute": bool(spec.optimizations.gradient_checkpointing),
        "tensor_model_parallel_size": launch.gpus if launch.strategy == "tp" else launch.tp or 1,
        "pipeline_model_parallel_size": launch.pp or 1,
    }  # fmt: skip


def record(run: TrainingRun, values: dict[str, Any]) -> None:
    """Train as the spec requests, and record each step."""
    with megatron_model.on_cpu() if device().type == "cpu" else nullcontext():
        own_loop.require_group()
        _Loop(run, values).train()


class _Loop:
    """A training loop with Megatron's model and optimizer, which records each step."""

    def __init__(self, run: TrainingRun, values: dict[str, Any]) -> None:
        from megatron.core import parallel_state, tensor_parallel

        self._run, self._values, self._spec = run, values, run.spec
        self._config = megatron_model.supported(values, run.spec.model.id)
        ranks = {name: values[name] for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
        # Ranks that process the same part of the batch have consecutive numbers.
        parallel_state.initialize_model_parallel(**ranks, order="tp-cp-ep-pp-dp", create_gloo_process_groups=False)
        if device().type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(values["seed"])
        run.phases.enter("setup")
        self._model = megatron_model.build(self._config, values)
        megatron_model.read_weights(self._model, self._config, values)
        self._rows = own_loop.read_rows()
        self._total = own_loop.total_steps(self._spec, len(self._rows))
        self._optimizer = megatron_model.optimizer(self._model, values)
        self._torch_optimizers = [each.optimizer for each in self._optimizer.chained_optimizers]
        self._schedulers = [
            get_scheduler(values["lr_decay_style"], each, values["lr_warmup_iters"], self._total)
            for each in self._torch_optimizers
        ]
        run.write_facts(**self._model_facts())

    def train(self) -> None:
        run = self._run
        recorder = run.recorder = recorder_of(self._spec, run.directory)
        run.phases.enter("train")
        recorder.start(self._total)
        share = parallel.share_of(self._spec.launch, parallel.rank() or 0)
        for step in own_loop.steps_of(self._spec, len(self._rows)):
            batches = [[self._rows[row] for row in shares[share]] for shares in step]
            labels = sum(int((self._rows[row][1] != IGNORE).sum()) for each in step for rows in each for row in rows)
            self._step(batches, labels)
            if recorder.step == 1:
                run.write_facts(**self._step_facts())
                recorder.restart()
        run.phases.enter("finish")
        run.finish()
        if self._spec.measure.save_adapter:
            run.phases.enter("save")
            self._save(run.directory.adapter)

    def _step(self, batches: list[list[own_loop.Sample]], labels: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        recorder: Any = self._run.recorder
        size = self._values["micro_batch_size"]
        parts = [batch[at : at + size] for batch in batches for at in range(0, max(len(batch), 1), size)]
        tensors = iter([_padded(part) for part in parts])
        recorder.begin_step()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        # Megatron divides the loss by the micro-batches, and averages gradients over data-parallel ranks.
        scale = len(parts) * self._spec.launch.data_parallel_size / max(labels, 1)

        def forward(batch: Iterator[tuple[Tensor, Tensor, BatchCount]], model: Any) -> tuple[Tensor, Any]:
            ids, targets, count = next(batch)
            recorder.micro_batch(count, None)
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            return model(ids, positions, None, labels=targets.clamp(min=0)), partial(_loss, targets, scale)

        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=tensors, model=[self._model], num_microbatches=len(parts),
            seq_length=0, micro_batch_size=size, forward_only=False,
        )  # fmt: skip
        recorder.micro_batch(None, self._loss_of_step([each["loss"] / len(parts) for each in losses]))
        recorder.begin_optimizer()
        rate = float(self._schedulers[0].get_last_lr()[0])
        self._optimizer.prepare_grads()
        norm = self._clip()
        self._optimizer.step_with_ready_grads()
        for scheduler in self._schedulers:
            scheduler.step()
        recorder.end_step(norm, rate)

    def _clip(self) -> Tensor:
        """Return the norm of all gradients. If requested, clip the gradients like torch's clip_grad_norm_.

        Megatron's function accepts only float32 gradients, and copies each norm to the host if Apex is not installed.
        """
        (optimizer,) = self._optimizer.chained_optimizers
        norms = torch._foreach_norm(optimizer.get_grads_for_grad_norm(), 2, dtype=torch.float32)
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device())
        dist.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
        norm = total.sqrt()
        if limit := self._values["clip_grad"]:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([p.grad for p in optimizer.get_parameters() if p.grad is not None], factor)
        return norm

    def _loss_of_step(self, losses: list[Tensor]) -> Tensor:
        """Return the loss of this rank's part of the batch. The last pipeline stage sends it to the other stages."""
        from megatron.core import parallel_state

        total = torch.stack(losses).sum() if losses else torch.zeros((), device=device())
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
        return total

    def _save(self, folder: Path) -> None:
        """Write the trained weights to `folder` in the layout of Hugging Face."""
        from megatron.core import parallel_state
        from safetensors.torch import save_file

        config, written = self._config, dict[str, Tensor]()
        query_rows = config.num_attention_heads * config.head_dim
        for name, parameter in megatron_model.parameters(self._model).items():
            shares = [torch.empty_like(parameter) for _ in range(self._values["tensor_model_parallel_size"])]
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_gather(shares, parameter.detach().contiguous(), group=group)
            parts = megatron_model.joined(name, shares, config.num_key_value_heads, query_rows)
            written |= zip(megatron_model.sources(name), (part.cpu() for part in parts), strict=True)
        if dist.get_rank() == 0:
            config.save_pretrained(folder)
            save_file(written, folder / "model.safetensors", {"format": "pt"})

    def _model_facts(self) -> dict[str, Any]:
        """Return the entries of applied.json about the model. The parameters are counted in the equivalent Hugging Face
        model, because both models have the same weights."""
        with torch.device("meta"):
            equal = AutoModelForCausalLM.from_config(self._config, dtype=self._model.module.config.params_dtype)
        facts = effective_config.of_model(equal)
        leaves = Counter(type(m).__name__ for m in self._model.module.modules() if not list(m.children()))
        attention = self._model.module.decoder.layers[0].self_attention.core_attention
        live = {
            "class": type(self._model.module).__name__,
            "attention": "sdpa" if isinstance(attention, megatron_model.SdpaAttention) else type(attention).__name__,
            "modules": dict(leaves.most_common()),
        }
        return facts | {
            "device": effective_config.device_of(self._model),
            "trained_dtype": self._spec.model.dtype,
            "model": facts["model"] | live,
        }

    def _step_facts(self) -> dict[str, Any]:
        config = self._model.module.config
        trained = {str(p.dtype).removeprefix("torch.") for each in self._torch_optimizers for g in each.param_groups
                   for p in g["params"]}  # fmt: skip
        ranks = {name: getattr(config, f"{name}_model_parallel_size") for name in ("tensor", "pipeline")}
        return {
            "autocast": "no",
            "product_precision": {torch.bfloat16: "bf16", torch.float32: "fp32"}[config.params_dtype],
            "trained_dtype": ", ".join(sorted(trained)),
            "loss": "megatron.core.tensor_parallel.vocab_parallel_cross_entropy",
            "patched_by": "",
        } | own_loop.step_facts(self._spec, self._torch_optimizers[0], config.recompute_granularity == "full", ranks)


def _padded(samples: list[own_loop.Sample]) -> tuple[Tensor, Tensor, BatchCount]:
    """Return ids and next-token targets, both `(rows, tokens)` and padded on the right, and the BatchCount."""
    width = max((len(ids) for ids, _ in samples), default=2)
    ids = torch.zeros(max(1, len(samples)), width, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE)
    for row, (tokens, labels) in enumerate(samples):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        targets[row, : len(tokens) - 1] = torch.from_numpy(labels[1:])
    return ids.to(device()), targets.to(device()), own_loop.count(samples, width)


def _loss(targets: Tensor, scale: float, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and a copy for the recorder. Loss = `scale * sum(losses)` over positions with a target."""
    loss = losses.float().where(targets != IGNORE, 0.0).sum() * scale
    return loss, {"loss": loss.detach().clone()}
