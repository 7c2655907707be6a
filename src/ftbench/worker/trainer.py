"""trl's SFTTrainer with a spec's recipe, and what of the recipe can be verified on it."""

from contextlib import nullcontext
from dataclasses import replace
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
from ftbench.worker.data.collate import Collator
from ftbench.worker.data.order import Row, filled
from ftbench.worker.data.pictures import Picture
from ftbench.worker.data.prepare import Prepared
from ftbench.worker.device import device
from ftbench.worker.measure import applied
from ftbench.worker.measure.batch_count import COUNT
from ftbench.worker.model.vision import reads_images
from ftbench.worker.optimizations import cuda_graph, feature_cache, gradient_checkpointing, optimizer_in_backward

DEFAULT_PROCESSES = 4  # that make batches, where the spec says `on`
PRECISION = {"bf16": {"bf16": True}, "fp16": {"bf16": False, "fp16": True}, "fp32": {"bf16": False}}


COPY = "ref"  # trl's name for the copy that it makes of an adapter


class Loop:
    """What is ours in any of trl's trainers. `batches` are the shapes of those seen so far, and whether they held
    padding."""

    accelerator: Any
    model: Any
    recorder: Any
    batches: set[tuple[tuple[int, ...], bool]]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the default walks over all parameters at each micro-batch."""
        return 0

    def loaders(self) -> list[Any]:
        """Return the iterators whose processes make batches, of training first."""
        kept = [getattr(loader, "base_dataloader", loader) for loader in self.accelerator._dataloaders]
        return [iterator for loader in kept if (iterator := loader._iterator) is not None]

    def end_loaders(self) -> None:
        """End the processes that make batches."""
        for iterator in self.loaders():
            iterator._shutdown_workers()

    def forget_copy(self) -> None:
        """Leave the weights under the adapters as the reference: trl copies adapters that it is given, for those that
        were trained before, and these begin at zero."""
        if self.has_copy():
            self.model.delete_adapter(COPY)

    def has_copy(self) -> bool:
        """Return whether the reference is a copy of the adapters."""
        return COPY in getattr(self.model, "peft_config", {})

    def verify(self, spec: Experiment) -> list[str]:
        """Return what of the objective is not as the spec says."""
        return []

    def facts(self) -> dict[str, Any]:
        """Return what the objective tells applied.json."""
        return {}


class Trainer(Loop, SFTTrainer):
    """Trains as trl does."""

    without_trls_metrics = False
    shares: int | None = None  # of the batch, where the ranks of one have parts of its sequences
    features: feature_cache.Features | None = None
    graph: cuda_graph.GraphedStep | None = None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Pass forward and backward as trl does, or replay how it did."""
        if self.graph is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self.graph(super().training_step, model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute trl's loss, with the entropy and accuracy that it adds; where the loss is ours or Liger's there are
        no logits to compute them from, and transformers' does."""
        count = inputs.pop(COUNT)
        if parallel.rank() is not None and not self.model.training:
            # By the tokens of this rank's share: the recorder's rows are weighted by them.
            kwargs["num_items_in_batch"] = self.shares and max(1, count.labels) * self.shares
        self.batches.add((tuple(inputs["input_ids"].shape), count.padded > count.real))
        if self.features is not None and self.features.show(count.pictures):
            count.of_images = replace(count.of_images, patches=0)  # none that the encoder sees
        if not self.without_trls_metrics:
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs.pop("_prediction_loss_only", None)
        return transformers.Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def build(spec: Experiment, run: RunDir, model: Any, tokenizer: Any, data: Prepared) -> Trainer:
    """Return the trainer with the spec's recipe. Samples come in the order in which they were prepared, so that every
    method sees the same tokens in the same order."""
    most = data.most_parts(spec.train.batch_size, max(data.longest, spec.dataset.max_length))
    pictures: list[Picture] = []
    size = spec.train.batch_size * spec.launch.shares if spec.launch.shares > 1 else 1
    if spec.launch.sharded and data.pixels:
        _check_pictures(spec, data, size)
    train, evaluation = (dataset(filled(rows, size), pictures) for rows in (data.train, data.evaluation))
    labels = data.most_labels(spec.train.batch_size) if spec.optimizations.cuda_graph else 0
    collator = Collator(spec, tokenizer.pad_token_id or 0, data.longest, most, data.pixels, pictures, labels)
    loop = Trainer(
        model=model,
        args=arguments(spec, run, model),
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=evaluation if data.evaluation else None,
        data_collator=collator,
        **optimizer.arguments(spec),
    )
    # transformers says of Qwen's models with images that they take no count of a step's label tokens. Their losses do:
    # without it micro-batches and ranks would count alike, however many tokens they have.
    loop.model_accepts_loss_kwargs |= reads_images(model.config)
    if spec.launch.ranks > 1 and hasattr(strategy := parallel.load(spec.launch.strategy), "attach"):
        strategy.attach(loop, spec)
    optimizer.attach(loop, spec)
    optimizer_in_backward.attach(loop, spec)
    loop.batches, loop.features, loop.graph = set(), feature_cache.of(model), cuda_graph.of(model)
    loop.shares = spec.launch.shares if spec.launch.parts_of_sequence > 1 else None
    loop.without_trls_metrics = bool(spec.optimizations.chunked_loss or spec.optimizations.liger)
    return loop


def _check_pictures(spec: Experiment, data: Prepared, size: int) -> None:
    """Raise SpecError where a batch of some rank would hold no picture: it would not gather the encoder's weights, for
    which the others wait."""
    train, step = spec.train, size * spec.train.gradient_accumulation_steps
    steps = len(data.train) // step
    seen = data.train if train.max_steps is None else data.train[: train.max_steps * step]
    ways = {
        "train": (seen, "dataset.samples", f", or train.max_steps to {steps} or less" if steps else ""),
        "evaluate": (data.evaluation, "dataset.eval_samples", ""),
    }
    for what, (rows, key, way_out) in ways.items():
        whole = filled(rows, size)
        batches = (at for at in range(0, len(whole), train.batch_size))
        alone = next((at for at in batches if not _show_some(whole[at : at + train.batch_size])), None)
        if alone is None:
            continue
        strategy = f"launch.strategy {spec.launch.strategy}: "
        if alone < len(rows):
            raise SpecError(f"{strategy}a batch of {train.batch_size} rows to {what} on shows no picture, and the GPUs "
                            "that have some would wait for it: use ddp, or rows that show one each")  # fmt: skip
        raise SpecError(f"{strategy}{len(rows)} rows to {what} on leave a GPU without a picture in the last batch, and "
                        f"the others would wait for it: set {key} to a multiple of {size}{way_out}")  # fmt: skip


def _show_some(rows: list[Row]) -> bool:
    return any(sample.pictures for row in rows for sample in row)


def arguments(spec: Experiment, run: RunDir, model: Any) -> SFTConfig:
    """Return the spec's recipe as SFTTrainer takes it."""
    said = recipe(spec, run, model) | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if spec.optimizations.chunked_loss or spec.optimizations.liger:
        said["loss_type"] = "nll"
    if spec.launch.ranks == 1:
        return SFTConfig(**said)
    strategy = parallel.load(spec.launch.strategy)
    made = SFTConfig(**said | strategy.arguments(spec))
    if hasattr(strategy, "prepare"):
        strategy.prepare(made)
    return made


def recipe(spec: Experiment, run: RunDir, model: Any) -> dict[str, Any]:
    """Return the spec's recipe in trl's words; what ftbench does itself (logging, saving, tokenising) is off."""
    train, processes = spec.train, _loader_processes(spec)
    on_gpu = "cuda" in (next(model.parameters()).device.type, device().type)
    return dict(
        output_dir=str(run.path / "trainer"),
        per_device_train_batch_size=train.batch_size,
        per_device_eval_batch_size=train.batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        optim="adamw_torch" if optimizer.arguments(spec) else train.optimizer,
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        data_seed=train.seed,
        gradient_checkpointing=bool(gradient_checkpointing.asked_for(spec)),
        activation_offloading=spec.optimizations.activation_offload,
        eval_strategy="epoch" if spec.measure.eval == "epoch" else "no",
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=processes,
        dataloader_persistent_workers=processes > 0,
        accelerator_config={
            "non_blocking": on_gpu,  # else each copy waits for all that the device has still to do
            # Else each GPU keeps whole gradients until the last batch of a step.
            "gradient_accumulation_kwargs": {"sync_each_batch": spec.launch.sharded},
        },
        train_sampling_strategy="sequential",
        max_length=None,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it waits for the device at every micro-batch
        save_strategy="no",
        report_to=(list(train.report_to) if parallel.is_first() else []) or "none",
        run_name=run.run_id,
        project="ftbench",
        router_aux_loss_coef=0.0,  # a loss in nats per token; trl would add each micro-batch's balancing loss undivided
        disable_tqdm=True,
        **PRECISION[train.precision],
    )


def _loader_processes(spec: Experiment) -> int:
    number = spec.optimizations.loader_processes
    return DEFAULT_PROCESSES if number is True else int(number)


def dataset(rows: list[Row], pictures: list[Picture]) -> Dataset:
    """Return a row's samples end to end, how long each is, and the places of its images in `pictures`, where they are
    added."""
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
    """Return what of optimizer, precision and batches is not as the spec says, read from the live objects."""
    problems = [*trainer.verify(spec), *optimizer.verify(trainer.optimizer, spec)]
    if spec.optimizations.activation_offload and isinstance(trainer.maybe_activation_offload_context, nullcontext):
        problems.append("optimizations.activation_offload is on and the trainer offloads nothing")
    problems += collate.verify(spec, trainer.batches)
    processes = sum(len(loader._workers) for loader in trainer.loaders()[:1])
    if processes != _loader_processes(spec):
        problems.append(f"optimizations.loader_processes is on and {processes} processes make batches")
    autocast = applied.autocast(trainer)
    if autocast != {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}[spec.train.precision]:
        problems.append(f"train.precision is {spec.train.precision} and the trainer computes in {autocast}")
    if spec.launch.ranks > 1:
        problems += parallel.load(spec.launch.strategy).verify(trainer, spec) + _verify_mean(trainer)
    return problems


def _verify_mean(trainer: Trainer) -> list[str]:
    """Return that ranks with more tokens would count as much as others, where the model takes no count of all."""
    if trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs:
        return []
    return [f"{type(trainer.model).__name__} divides its loss by the tokens of each rank, not by those of all"]
