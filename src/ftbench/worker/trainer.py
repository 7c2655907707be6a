"""Build trl's SFTTrainer with the settings of a spec, and verify the settings."""

from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir
from ftbench.worker import optimizer, parallel
from ftbench.worker.data import collate
from ftbench.worker.data.collate import Collator, filled
from ftbench.worker.data.images import Picture
from ftbench.worker.data.prepare import Prepared
from ftbench.worker.data.tokens import Row
from ftbench.worker.device import device
from ftbench.worker.frameworks import trainer_arguments
from ftbench.worker.measure import effective_config
from ftbench.worker.measure.batch_count import COUNT
from ftbench.worker.methods import mismatches, unsloth
from ftbench.worker.model.vision import reads_images
from ftbench.worker.optimizations import chunked_loss, cuda_graph, gradient_checkpointing, optimizer_in_backward

DEFAULT_PROCESSES = 4  # data loader processes for `loader_processes: on`
COPY = "ref"  # trl's name for its copy of the adapters


class TrainerMixin:
    """ftbench's additions to every trainer of trl. `batches` contains pairs: the shape of a batch, and True if the
    batch had samples with padding."""

    accelerator: Any
    model: Any
    recorder: Any
    batches: set[tuple[tuple[int, ...], bool]]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0. The default method iterates over all parameters in every micro-batch, which is slow."""
        return 0

    def loaders(self) -> list[Any]:
        """Return the iterators of the active data loaders. The iterator for training is first."""
        bases = [getattr(loader, "base_dataloader", loader) for loader in self.accelerator._dataloaders]
        return [iterator for loader in bases if (iterator := loader._iterator) is not None]

    def forget_copy(self) -> None:
        """Delete trl's copy of the adapters. The model without adapters is then the reference.

        trl copies adapters because they may already be trained. New adapters start at zero, so a copy is not needed.
        """
        if self.has_copy():
            self.model.delete_adapter(COPY)

    def has_copy(self) -> bool:
        """Return whether trl copied the adapters. trl uses this copy as the reference model."""
        return COPY in getattr(self.model, "peft_config", {})

    def verify(self, spec: Experiment) -> list[str]:
        """Return a message for each setting of the objective that was not applied."""
        return []

    def facts(self) -> dict[str, Any]:
        """Return the entries of applied.json about the objective (DPO or GRPO). SFT does not have such entries."""
        return {}


class Trainer(TrainerMixin, SFTTrainer):
    """SFTTrainer that supports CUDA graphs, and losses that do not compute logits."""

    without_trls_metrics = False
    shares: int | None = None  # with context parallelism: number of groups that process different sequences
    graph: cuda_graph.GraphedStep | None = None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Run the forward and backward pass, or replay the CUDA graph. Return the loss."""
        if self.graph is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self.graph(super().training_step, model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return trl's loss. trl also computes entropy and accuracy from the logits.

        Fused losses do not compute logits. For them, use transformers' method, which does not compute these metrics.
        """
        count = inputs.pop(COUNT)
        if parallel.rank() is not None and not self.model.training:
            # Divide by the label tokens of this rank, which the recorder uses as weights.
            kwargs["num_items_in_batch"] = self.shares and max(1, count.labels) * self.shares
        self.batches.add((tuple(inputs["input_ids"].shape), count.padded > count.real > 0))
        if not self.without_trls_metrics:
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs.pop("_prediction_loss_only", None)
        return transformers.Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def build(spec: Experiment, run: RunDir, model: Any, tokenizer: Any, data: Prepared) -> Trainer:
    """Return the SFT trainer for the spec. The order of the samples is fixed: all methods train on the same tokens."""
    most, on = data.most_parts(spec.train.batch_size), spec.optimizations
    pictures: list[Picture] = []
    several = spec.launch.data_parallel_size > 1 or spec.launch.pp
    size = spec.train.batch_size * spec.launch.data_parallel_size if several else 1
    if spec.launch.sharded and data.pixels:
        _check_pictures(spec, data, size)
    train, evaluation = (dataset(filled(rows, size), pictures) for rows in (data.train, data.evaluation))
    labels = data.most_labels(spec.train.batch_size) if on.chunked_loss and on.fixed_shape else 0
    few = 0 < 2 * labels < spec.train.batch_size * data.longest
    if not (few and chunked_loss.skip_unread(model, spec)) and on.cuda_graph is not True:
        labels = 0  # the number of labels may vary
    collator = None
    if own_batches := unsloth.batches_itself(spec, data.pixels):
        for each in (train, evaluation):
            vars(each)[unsloth.LONGEST] = data.longest
    else:
        pad = tokenizer.pad_token_id or 0
        collator = Collator(spec, pad, data.longest, most, data.pixels, pictures, labels, data.longest_sample)
    loop = Trainer(
        model=model,
        args=sft_config(spec, run, model),
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=evaluation if data.evaluation else None,
        data_collator=collator,
        **optimizer.arguments(spec),
    )
    if spec.method.quantised and spec.train.precision == "fp32":  # trl casts adapters on quantized models to bfloat16
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.data = parameter.data.float()
    if own_batches:
        loop.data_collator.torch_call = collate.counting(loop.data_collator.torch_call)
    # Losses of Qwen's vision models accept the number of label tokens, but transformers does not pass the number.
    # Micro-batches and ranks with different numbers of tokens would then have equal weights.
    loop.model_accepts_loss_kwargs |= reads_images(model.config)
    if spec.launch.gpus > 1 and hasattr(strategy := parallel.load(spec.launch.strategy), "attach"):
        strategy.attach(loop, spec)
    optimizer.attach(loop, spec)
    optimizer_in_backward.attach(loop, spec)
    loop.batches, loop.graph = set(), cuda_graph.of(model)
    loop.shares = spec.launch.data_parallel_size if spec.launch.parts_of_sequence > 1 else None
    loop.without_trls_metrics = bool(spec.optimizations.chunked_loss or spec.optimizations.liger)
    return loop


def _check_pictures(spec: Experiment, data: Prepared, size: int) -> None:
    """Raise SpecError if a rank would get a batch without images. This rank would skip the encoder, and the other ranks
    would wait for its part of the encoder's weights."""
    train, step = spec.train, size * spec.train.gradient_accumulation_steps
    used = data.train[: train.max_steps and train.max_steps * step]
    for key, rows in (("samples", used), ("eval_samples", data.evaluation)):
        full = filled(rows, size)
        for at in range(0, len(full), train.batch_size):
            if not any(sample.pictures for row in full[at : at + train.batch_size] for sample in row):
                raise SpecError(
                    f"launch.strategy {spec.launch.strategy}: a batch of dataset.{key} has no image, and other GPUs "
                    f"would wait for it: set it to a multiple of {size}, use an image in every row, or use ddp"
                )


def sft_config(spec: Experiment, run: RunDir, model: Any) -> SFTConfig:
    """Return the SFTConfig for the spec."""
    options = training_arguments(spec, run, model) | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if spec.optimizations.chunked_loss or spec.optimizations.liger:
        options["loss_type"] = "nll"
    if spec.method.name == "unsloth":
        options |= unsloth.batching(spec)
    if spec.launch.gpus == 1:
        return SFTConfig(**options)
    strategy = parallel.load(spec.launch.strategy)
    config = SFTConfig(**options | strategy.arguments(spec))
    if hasattr(strategy, "prepare"):
        strategy.prepare(config)
    return config


def training_arguments(spec: Experiment, run: RunDir, model: Any) -> dict[str, Any]:
    """Return the settings of the spec as arguments of trl. ftbench replaces trl's logging, saving and tokenization."""
    train, processes = spec.train, _loader_processes(spec)
    on_gpu = "cuda" in (next(model.parameters()).device.type, device().type)
    return trainer_arguments(spec) | {
        "output_dir": str(run.path / "trainer"),
        "per_device_eval_batch_size": train.batch_size,
        "optim": "adamw_torch" if optimizer.arguments(spec) else train.optimizer,
        "gradient_checkpointing": bool(gradient_checkpointing.requested(spec)),
        "activation_offloading": spec.optimizations.activation_offload,
        "eval_strategy": "epoch" if spec.measure.eval == "epoch" else "no",
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "dataloader_num_workers": processes,
        "dataloader_persistent_workers": processes > 0,
        "accelerator_config": {
            "non_blocking": on_gpu,  # without this, each copy synchronizes with the device
            # Without this, each GPU keeps unsharded gradients until the last micro-batch of a step.
            "gradient_accumulation_kwargs": {"sync_each_batch": spec.launch.sharded},
        },
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # the filter synchronizes with the device in every micro-batch
        "run_name": run.run_id,
        "project": "ftbench",
        "router_aux_loss_coef": 0.0,  # without this auxiliary loss, the loss is in nats per token
    }


def _loader_processes(spec: Experiment) -> int:
    number = spec.optimizations.loader_processes
    return DEFAULT_PROCESSES if number is True else int(number)


def dataset(rows: list[Row], pictures: list[Picture]) -> Dataset:
    """Return a data set of rows. A row has concatenated samples, the lengths of the samples, and image indexes. The
    indexes are positions in `pictures`. This function appends the images of the rows to `pictures`."""
    shown = [[picture for sample in row for picture in sample.pictures] for row in rows]
    starts = list(accumulate(map(len, shown), initial=len(pictures)))
    pictures += [picture for row in shown for picture in row]
    columns = {
        "input_ids": [[token for sample in row for token in sample.ids] for row in rows],
        "labels": [[label for sample in row for label in sample.labels] for row in rows],
        "lengths": [[len(sample.ids) for sample in row] for row in rows],
        **({"shown": [[*range(*pair)] for pair in pairwise(starts)]} if any(shown) else {}),
    }
    return Dataset.from_dict(columns).with_format("numpy")


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return a message for each optimizer, precision or batch setting that was not applied."""
    problems = [*trainer.verify(spec), *optimizer.verify(trainer.optimizer, spec)]
    problems += collate.verify(spec, trainer.batches)
    problems += unsloth.verify_choices(trainer, spec) if spec.method.name == "unsloth" else []
    processes = sum(len(loader._workers) for loader in trainer.loaders()[:1])
    offload = bool(spec.optimizations.activation_offload)
    offloads = offload and not isinstance(trainer.maybe_activation_offload_context, nullcontext)
    problems += mismatches({
        "optimizations.activation_offload": (offload, offloads),
        "optimizations.loader_processes": (_loader_processes(spec), processes),
        "train.precision": (spec.train.precision, effective_config.PRECISIONS.get(effective_config.autocast(trainer))),
    })  # fmt: skip
    if spec.launch.gpus > 1:
        problems += parallel.load(spec.launch.strategy).verify(trainer, spec) + _verify_mean(trainer)
    return problems


def _verify_mean(trainer: Trainer) -> list[str]:
    """Return a message if the loss is a mean over ranks, and not a mean over the tokens of all ranks."""
    if trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs:
        return []
    return [f"{type(trainer.model).__name__} divides its loss by the tokens of each rank, not by those of all ranks"]
