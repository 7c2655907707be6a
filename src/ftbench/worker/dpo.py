"""Train on preference pairs with trl's DPOTrainer.

The reference is the model without adapters, or a second model. The spec can request precomputed log probabilities.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import convert_outputs_to_fp32
from trl import DPOConfig, DPOTrainer

from ftbench.spec.experiment import Experiment
from ftbench.spec.objectives import Dpo
from ftbench.worker.data.collate import Collator, samples_of
from ftbench.worker.data.prepare import Prepared
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure.batch_count import COUNT
from ftbench.worker.methods import mismatches
from ftbench.worker.outcome import Phases
from ftbench.worker.trainer import TrainerMixin, dataset, training_arguments
from ftbench.worker.training_run import TrainingRun

REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")  # data set columns with precomputed log probabilities


class DpoTrainer(TrainerMixin, DPOTrainer):
    """DPOTrainer for preference pairs that are already tokenized."""

    def __init__(self, phases: Phases, **options: Any) -> None:
        self._phases = phases
        super().__init__(**options)
        self.batches = set()
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the number of pairs in the step
        self.forget_copy()

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        self.forget_copy()
        with self._phases.within("reference"):
            return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return log probabilities of the reference, with autocast and float32 logits as accelerate has in training."""
        with self.accelerator.autocast():
            model, inputs = convert_outputs_to_fp32(model.__call__), {at: inputs[at] for at in inputs if at != COUNT}
            return super().compute_ref_log_probs(model, inputs)

    def _get_num_items_in_batch(self, batches: list[dict[str, Any]], device: Any) -> int:
        return sum(batch[COUNT].samples for batch in batches)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return trl's loss. In training, all pairs of a step have the same weight, also in a smaller micro-batch.
        Store trl's reward metrics in the BatchCount of the batch."""
        count, pairs = inputs.pop(COUNT), kwargs.pop("num_items_in_batch", None)
        self.batches.add((tuple(inputs["input_ids"].shape), count.padded > count.real))
        result = super().compute_loss(model, inputs, *args, **kwargs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        count.rewards = tuple(count.samples * metrics[f"rewards/{name}"][-1] for name in ("accuracies", "margins"))
        return result * (count.samples / pairs) if pairs else result

    def verify(self, spec: Experiment) -> list[str]:
        """Return a message for each DPO setting that was not applied."""
        wanted: Any = spec.objective
        computed = set(REFERENCE) <= set(self.train_dataset.column_names)
        problems = mismatches({
            "objective.beta": (wanted.beta, self.beta),
            "objective.precompute_ref_log_probs": (wanted.precompute_ref_log_probs, computed),
            "the second model of objective dpo": (spec.second_model, self.ref_model is not None),
        })  # fmt: skip
        if self.has_copy():
            problems.append("objective dpo: the reference is a copy of the adapters, not the base weights")
        return problems

    def facts(self) -> dict[str, Any]:
        in_step = not set(REFERENCE) <= set(self.train_dataset.column_names)
        kind = "weights under the adapters" if self.ref_model is None else "second model"
        reference = {"kind": kind if in_step else "computed before training", "in_step": in_step}
        return {"loss_normalisation": "pairs of the step", "reference": reference}


class PairCollator(Collator):
    """Pads preference pairs like trl's collator. All chosen sequences come first, then all rejected sequences."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        pairs = [samples_of(row) for row in rows]
        sequences = [pair[side] for side in (0, 1) for pair in pairs]
        alone = [{"input_ids": ids, "labels": labels, "lengths": [len(ids)]} for ids, labels in sequences]
        batch = super().__call__(alone)
        batch["completion_mask"] = (batch.pop("labels") != IGNORE).long()
        count = batch[COUNT]
        count.samples, count.sequences, count.tokens = len(rows), 2, [ids.tobytes() for two in pairs for ids, _ in two]
        return batch | {name: torch.tensor([float(row[name]) for row in rows]) for name in REFERENCE if name in rows[0]}


def build(run: TrainingRun, model: Any, tokenizer: Any, data: Prepared, reference: Any) -> DpoTrainer:
    """Return the DPO trainer, which keeps the order of the pairs. `reference` is the second model or None."""
    spec, objective = run.spec, cast(Dpo, run.spec.objective)
    options = training_arguments(spec, run.directory, model) | {"disable_dropout": True, "beta": objective.beta}
    return DpoTrainer(
        run.phases,
        model=model,
        ref_model=reference,
        args=DPOConfig(**options, precompute_ref_log_probs=objective.precompute_ref_log_probs),
        processing_class=tokenizer,
        train_dataset=dataset(data.train, []),
        eval_dataset=dataset(data.evaluation, []) if data.evaluation else None,
        data_collator=PairCollator(spec, tokenizer.pad_token_id or 0, data.longest, None),
    )
