"""Read the output of Megatron-LM and Megatron-Bridge.

The formats are those of `training_log` (NVIDIA/Megatron-LM, megatron/training/training.py; NVIDIA-NeMo/Megatron-Bridge,
training/utils/train_utils.py).
"""

import re
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ftbench.core.rows import MOST_STEPS, StepRow
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.store.foreign_logs import ForeignLog, as_float, number

_TIME, _BATCH = "elapsed time per iteration (ms)", "global batch size"
_LINE = re.compile(r"iteration +(\d{1,12})/ *(\d{1,12}) \| (consumed samples: [^\n]*)")
_EVALUATED = re.compile(r"validation loss at iteration (\d{1,12})\b[^|\n]*\| lm loss value: (\S+)")
_SEQUENCE = re.compile(r"^.{0,80}?\bseq_length(?: \.+|:) (\d{1,9})\s*$", re.MULTILINE)  # in its arguments or its YAML
_MEMORY = re.compile(r"\(after (\d{1,12}) iterations\) memory \((MB|GB)\)((?: \| [\w -]+: [\d.]+)+)")
_PEAKS = {"max allocated": "peak_memory_gb", "mem-max-allocated-gigabytes": "peak_memory_gb",
          "max reserved": "peak_reserved_gb", "mem-max-reserved-gigabytes": "peak_reserved_gb"}  # fmt: skip
_IN_GIB = {"MB": 2**20 / GIB, "GB": 1e9 / GIB}  # Megatron-LM and Megatron-Bridge
_RATE, _SKIPPED, _NAN = (
    "throughput per GPU (TFLOP/s/GPU)", "number of skipped iterations", "number of nan iterations",
)  # fmt: skip

Values = dict[str, float]


def is_megatron(data: bytes) -> bool:
    """Return whether a file has a line of a Megatron iteration."""
    return _LINE.search(data.decode("utf-8", "replace")) is not None


def megatron(file: Path, data: bytes) -> ForeignLog:
    """Read a log. Each row is the last iteration of a logging interval.

    It has the mean iteration time, the samples of a global batch and, if logged, the memory of the rank with the most.
    """
    text = data.decode("utf-8", "replace")
    lines = [(int(match[1]), int(match[2]), _values(match[3])) for match in _LINE.finditer(text)]
    rows = [*_train_rows(file, lines)]
    steps = {row.step: row for row in rows}
    for match in _MEMORY.finditer(text):  # each rank may print it
        for name, value in _values(match[3]).items():
            if (column := _PEAKS.get(name)) and (row := steps.get(int(match[1]))):
                setattr(row, column, max(getattr(row, column) or 0.0, value * _IN_GIB[match[2]]))
    length = _SEQUENCE.search(text)
    for row in rows if length else ():
        row.padded_tokens = (row.samples or 0) * int(length[1]) or None if length else None
    for match in _EVALUATED.finditer(text):
        loss = number(as_float(match[2]), "eval_loss")
        rows.append(StepRow(step=min(int(match[1]), MOST_STEPS - 1), phase="evaluate", loss=loss))
    rows.sort(key=lambda row: (row.step or 0, row.phase == "evaluate"))
    known = {"tokens": length, "memory": any(row.peak_memory_gb for row in rows)}
    lacks = "".join(f"{name}, " for name, value in known.items() if not value) + "energy and most of the recipe"
    batch, train_s = int(lines[-1][2][_BATCH]), max(row.elapsed_time_sec or 0.0 for row in rows)
    return ForeignLog("Megatron's log", rows, lacks, [*_notes(lines, rows, bool(length))], batch, train_s)


def _values(text: str) -> Values:
    pairs = (part.partition(":") for part in text.split("|"))
    numbers = ((name.strip(), as_float(value)) for name, _, value in pairs)
    return {name: value for name, value in numbers if value is not None}


def _train_rows(file: Path, lines: list[tuple[int, int, Values]]) -> Iterator[StepRow]:
    """Yield a row per line. Raise SpecError for a line without time or batch, and for a second run."""
    before, elapsed = 0, 0.0
    for step, planned, values in lines:
        if not before < step < MOST_STEPS:
            raise SpecError(f"{file}: goes back from step {before} to {step}; a file must have one run")
        time, batch = number(values.get(_TIME)), number(values.get(_BATCH))
        if not time or time < 0 or not batch or batch < 1:
            raise SpecError(f"{file}: iteration {step} lacks {_BATCH if time else _TIME}, which Megatron prints")
        elapsed += (step - before) * time / 1000
        loss = values.get("lm loss", float("nan") if values.get(_NAN) else None)  # a NaN sum is not printed
        yield StepRow(
            step=step, phase="train", progress_ratio=step / planned if planned else None, elapsed_time_sec=elapsed,
            step_time_s=time / 1000, samples=int(batch), loss=number(loss, "loss"),
            grad_norm=number(values.get("grad norm"), "grad_norm"), learning_rate=number(values.get("learning rate")),
        )  # fmt: skip
        before = step


def _notes(lines: list[tuple[int, int, Values]], rows: list[StepRow], has_length: bool) -> Iterator[str]:
    yield "the batch is the global batch of all GPUs"
    if has_length:
        yield "tokens are positions, padding included: samples times seq_length"
    every = max(later - earlier for earlier, later in pairwise([0, *(step for step, _, _ in lines)]))
    if every > 1:
        yield f"a line is the mean of up to {every} steps: single steps are not known"
    if rates := [values[_RATE] for _, _, values in lines if _RATE in values]:
        yield f"Megatron's own rate: {statistics.median(rates):g} TFLOP/s per GPU (median)"
    if seen := [row.step for row in rows if row.peak_memory_gb]:
        yield f"memory is the highest of all ranks, up to step {max(map(int, filter(None, seen)))}"
    for name, words in ((_SKIPPED, "were skipped"), (_NAN, "had a NaN loss")):
        if count := sum(values.get(name, 0) for _, _, values in lines):
            yield f"{count:.0f} iterations {words}"
