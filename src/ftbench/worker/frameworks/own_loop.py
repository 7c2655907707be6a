"""Read rows, build batches and report settings for Megatron and verl, which do not use transformers.Trainer."""

import math
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import load_from_disk

from ftbench.spec.experiment import Experiment
from ftbench.worker import frameworks, parallel
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure import effective_config
from ftbench.worker.measure.batch_count import BatchCount, count_of

Sample = tuple[np.ndarray, np.ndarray]  # token ids and labels


def read_rows() -> list[Sample]:
    """Return the prepared rows in training order. The first token of a row has no label."""
    data = load_from_disk(frameworks.DATA)["train"]
    rows = [
        (np.asarray(ids, dtype=np.int64), np.asarray(labels, dtype=np.int64))
        for ids, labels in zip(data["input_ids"], data["labels"], strict=True)
    ]
    for _, labels in rows:
        labels[0] = IGNORE
    return rows


def count(samples: list[Sample], width: int) -> BatchCount:
    """Return the token counts of a micro-batch with rows that are padded to `width` tokens."""
    labels = sum(int((labels != IGNORE).sum()) for _, labels in samples)
    return count_of([ids for ids, _ in samples], len(samples) * width, labels)


def total_steps(spec: Experiment, rows: int) -> int:
    """Return the number of optimizer steps for this number of rows. The result is the same as in trl."""
    batches = math.ceil(rows / (spec.train.batch_size * spec.launch.data_parallel_size))
    return spec.train.max_steps or math.ceil(
        math.ceil(batches / spec.train.gradient_accumulation_steps) * spec.train.epochs
    )


def steps_of(spec: Experiment, rows: int) -> Iterator[list[list[range]]]:
    """Yield the micro-batches of each step. A micro-batch contains a range of row numbers for each data-parallel rank.
    The batches are the same as in trl. The last batches of an epoch can be shorter or empty."""

    def endless() -> Iterator[list[list[range]]]:
        size, several = spec.train.batch_size, spec.train.gradient_accumulation_steps
        starts = range(0, rows, size * spec.launch.data_parallel_size)
        while True:
            for first in range(0, len(starts), several):
                yield [
                    [range(min(at, rows), min(at + size, rows)) for at in range(start, start + starts.step, size)]
                    for start in starts[first : first + several]
                ]

    return islice(endless(), total_steps(spec, rows))


def require_group() -> None:
    """If this process is not in a process group, create a process group with one rank."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def step_facts(spec: Experiment, optimizer: Any, recomputes: bool, division: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of applied.json about the first step. `division` describes how the ranks divide the work."""
    return {
        "loss_normalisation": "label tokens of the step",
        "gradient_checkpointing": float(recomputes),
        "optimizer": effective_config.optimizer_facts(optimizer),
        "fp8_layers": 0,
        **({"parallel": parallel.facts(spec) | division} if spec.launch.gpus > 1 else {}),
    }
