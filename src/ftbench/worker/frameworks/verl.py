"""Train with verl's SFT trainer and FSDP2.

verl's sampler shuffles with a fixed seed, so the data set applies the inverse permutation. Wrapped methods of verl's
engine record the steps.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import get_scheduler

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.frameworks import DATA, OUTPUT, live, own_loop
from ftbench.worker.measure import effective_config
from ftbench.worker.methods import mismatches
from ftbench.worker.training_run import TrainingRun, recorder_of

_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}
_NO_CLIPPING = 1e30  # a limit without effect, because verl always clips


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return the changes to verl's `sft_trainer_engine.yaml`. Without flash-attn, verl supports only padded batches."""
    method: Any = spec.method
    train, on = spec.train, spec.optimizations
    attention = "sdpa" if on.attention == "auto" else on.attention
    products = "bf16" if "bf16" in (train.precision, {"bfloat16": "bf16"}.get(spec.model.dtype)) else "fp32"
    model_settings = {
        "path": model, "override_config": {"attn_implementation": attention}, "use_liger": bool(on.liger),
        "enable_gradient_checkpointing": bool(on.gradient_checkpointing),
        "use_remove_padding": attention == "flash_attention_2",
    }  # fmt: skip
    engine = {
        "strategy": "fsdp2", "model_dtype": {"bfloat16": "bf16", "float32": "fp32"}[spec.model.dtype],
        "mixed_precision": {"param_dtype": products, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_torch_compile": False,  # verl compiles only the entropy, which training does not need
    }  # fmt: skip
    optimizer = {
        "optimizer": _OPTIMIZERS[train.optimizer], "lr": train.learning_rate, "weight_decay": train.weight_decay,
        "clip_grad": train.max_grad_norm or _NO_CLIPPING,
        "override_optimizer_config": {"fused": True} if train.optimizer == "adamw_torch_fused" else None,
    }  # fmt: skip
    data = {
        "train_files": DATA, "train_batch_size": spec.global_batch, "micro_batch_size_per_gpu": train.batch_size,
        "max_length": spec.dataset.max_length, "use_dynamic_bsz": False, "num_workers": 0,
        "custom_cls": {"path": f"pkg://{__name__}", "name": VerlRows.__name__},
    }  # fmt: skip
    trainer = {
        "total_epochs": 1, "total_training_steps": train.max_steps,  # the data set repeats the rows
        "n_gpus_per_node": spec.launch.gpus_of_node, "nnodes": spec.launch.nodes, "default_local_dir": OUTPUT,
        "resume_mode": "disable", "save_freq": -1, "test_freq": -1, "logger": ["console"],
    }  # fmt: skip
    if method.adapters:
        targets = method.targets if method.targets == "all-linear" else list(method.targets)
        model_settings |= {"lora_rank": method.rank, "lora_alpha": int(method.alpha), "target_modules": targets}
    return {"model": model_settings, "engine": engine, "optim": optimizer, "data": data, "trainer": trainer}


class VerlRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Data set class for verl's `data.custom_cls`: the prepared rows, in an order that undoes verl's shuffling."""

    spec: Experiment  # set before verl creates the data set

    def __init__(self, **_: Any) -> None:
        self._rows = own_loop.read_rows()
        self._order = unshuffled(self.spec, len(self._rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = map(torch.from_numpy, self._rows[self._order[index]])
        mask = (labels != IGNORE).long()
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


def unshuffled(spec: Experiment, rows: int) -> list[int]:
    """Return the row number for each index of verl's data set. With this order, verl's batches are equal to trl's.

    The sampler is torch's DistributedSampler with seed 0: rank r of n gets the indices r, r + n, ... of a permutation.
    Raise SpecError if a batch is incomplete, because verl drops incomplete batches.
    """
    shares, size = spec.launch.data_parallel_size, spec.train.batch_size
    of_share: list[list[int]] = [[] for _ in range(shares)]
    for step in own_loop.steps_of(spec, rows):
        if len(step) < spec.train.gradient_accumulation_steps or any(
            len(each) < size for batch in step for each in batch
        ):
            raise SpecError(
                f"dataset: {rows:,} rows are not a multiple of the batch of a step, {spec.global_batch:,}, and verl "
                "drops the last batch: set dataset.samples to a multiple, or lower train.max_steps"
            )
        for batch in step:
            for share, each in enumerate(batch):
                of_share[share] += each
    count = len(of_share[0]) * shares
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    order = [0] * count
    for position, index in enumerate(shuffled):
        order[index] = of_share[position % shares][position // shares]
    return order


def record(run: TrainingRun, values: dict[str, Any]) -> None:
    """Train with verl's trainer as the spec requests, and record each step."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")  # verl reads the port, but does not use it in an existing process group
    own_loop.require_group()
    from verl.trainer.sft_trainer import SFTTrainer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    VerlRows.spec = run.spec
    rows = len(own_loop.read_rows())
    values["trainer"]["total_training_steps"] = steps = own_loop.total_steps(run.spec, rows)
    FSDPEngine._build_lora_module = _with_trl_adapters(FSDPEngine._build_lora_module, run.spec.train.seed)
    trainer = SFTTrainer(config=_config(values))
    trainer.ckpt_handler.save_checkpoint = lambda **_: None
    engine = trainer.engine
    train = run.spec.train
    # use transformers' schedulers, because verl does not have a linear schedule
    engine.lr_scheduler = get_scheduler(train.lr_scheduler, engine.optimizer, train.warmup_steps, steps)
    run.phases.enter("setup")
    run.write_facts(**effective_config.of_model(engine.module))
    run.require_applied(live.model_problems(engine.module, run.spec))
    recording = _Recording(run, engine, padded=not values["model"]["use_remove_padding"])
    run.phases.enter("train")
    recording.recorder.start(steps)
    trainer.fit()
    run.phases.enter("finish")
    run.finish()


def _config(values: dict[str, Any]) -> Any:
    """Return verl's default configuration with the changes in `values`."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine")
    OmegaConf.set_struct(config, False)
    return OmegaConf.merge(config, values)


def _with_trl_adapters(build: Callable[..., Any], seed: int) -> Callable[..., Any]:
    from ftbench.worker.frameworks.session import draw_adapters

    def build_lora(engine: Any, module: Any) -> Any:
        adapted = build(engine, module)
        draw_adapters(adapted, seed)
        return adapted

    return build_lora


class _Recording:
    """Records each step by wrapping methods of verl's engine. The methods of this class follow the order of a step."""

    def __init__(self, run: TrainingRun, engine: Any, padded: bool) -> None:
        self._run, self._engine, self._padded = run, engine, padded
        self.recorder = run.recorder = recorder_of(run.spec, run.directory)
        self._norm: float | None = None
        for name in ("train_batch", "forward_step", "optimizer_step", "lr_scheduler_step"):
            setattr(engine, name, partial(getattr(self, f"_{name}"), getattr(engine, name)))

    def _train_batch(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.recorder.begin_step()
        return train(*args, **kwargs)

    def _forward_step(self, forward: Callable[..., Any], micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        ids, masks = (
            [each.cpu().numpy() for each in micro_batch[name].unbind()] for name in ("input_ids", "loss_mask")
        )
        samples = [(row, np.where(mask, row, IGNORE)) for row, mask in zip(ids, masks, strict=True)]
        loss, output = forward(micro_batch, *args, **kwargs)
        count = own_loop.count(samples, max(map(len, ids)))
        if not self._padded:
            count.padded = count.real
        self.recorder.micro_batch(count, loss.detach())
        self.recorder.position = "backward"
        return loss, output

    def _optimizer_step(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.recorder.begin_optimizer()
        self._norm = update(*args, **kwargs)
        return self._norm

    def _lr_scheduler_step(self, advance: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rate = float(self._engine.optimizer.param_groups[0]["lr"])
        result = advance(*args, **kwargs)
        self.recorder.end_step(self._norm, rate)
        if self.recorder.step == 1:
            self._run.write_facts(**_facts(self._engine, self._run.spec))
            self._run.require_applied(_problems(self._engine, self._run.spec))
            self.recorder.restart()
        return result


def _facts(engine: Any, spec: Experiment) -> dict[str, Any]:
    """Return the entries of applied.json about the engine after the first step."""
    in_bf16 = engine._autocast_dtype == torch.bfloat16
    return {
        "autocast": "bf16" if in_bf16 else "no",
        "product_precision": "bf16" if in_bf16 else "fp32",
        "loss": "verl.workers.utils.losses.sft_loss",
        "patched_by": ", ".join(sorted(live.patched_by(engine.module))),
    } | own_loop.step_facts(
        spec, engine.optimizer, engine.module.is_gradient_checkpointing, {"engine": engine.engine_config.strategy}
    )


def _problems(engine: Any, spec: Experiment) -> list[str]:
    """Return a message for each difference between the engine and the training settings of the spec."""
    train, on, group = spec.train, spec.optimizations, engine.optimizer.param_groups[0]
    attention = engine.module.config._attn_implementation
    settings = {
        "train.optimizer": (_OPTIMIZERS[train.optimizer], type(engine.optimizer).__name__),
        "train.weight_decay": (train.weight_decay, group["weight_decay"]),
        "train.learning_rate": (train.learning_rate, engine.lr_scheduler.base_lrs[0]),
        "optimizations.attention": (on.attention if on.attention != "auto" else attention, attention),
        "optimizations.gradient_checkpointing": (
            bool(on.gradient_checkpointing), bool(engine.module.is_gradient_checkpointing),
        ),
    }  # fmt: skip
    return mismatches(settings, "verl: ")
