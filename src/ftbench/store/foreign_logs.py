"""Read logs of other tools: the Trainer (and axolotl), LLaMA-Factory, TensorBoard and W&B.

Each reader maps the tool's names to the columns of steps.csv.
"""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core.rows import LARGEST, MOST_STEPS, StepRow
from ftbench.errors import MissingError, SpecError, json_problem

Entry = dict[str, Any]
# Lower-case names without `train/` → the column. These tools report GiB.
_FIELDS = {
    "epoch": "epoch", "elapsed": "elapsed_time_sec", "_runtime": "elapsed_time_sec", "loss": "loss",
    "grad_norm": "grad_norm", "learning_rate": "learning_rate", "lr": "learning_rate",
    "memory/max_active (gib)": "peak_memory_gb", "memory/max_mem_active(gib)": "peak_memory_gb",
    "memory/device_reserved (gib)": "peak_reserved_gb", "memory/device_mem_reserved(gib)": "peak_reserved_gb",
}  # fmt: skip
_STEP = ("global_step", "current_steps", "step", "_step")
_MAY_DIVERGE = ("loss", "eval_loss", "grad_norm")  # may be NaN


@dataclass(slots=True)
class ForeignLog:
    """The content of a log.

    Attributes:
        kind: The tool and the file.
        rows: A row per logged step.
        lacks: The fields that the tool does not log, for a warning.
        notes: Further warnings.
        batch_size: Samples per forward pass, if logged.
        train_s: Seconds of the training, if logged.
        samples_per_s: The tool's own rate, if logged.
        timed_from_zero: Whether elapsed times start with the training; None without times.
    """

    kind: str
    rows: list[StepRow]
    lacks: str
    notes: list[str] = field(default_factory=list)
    batch_size: int | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    timed_from_zero: bool | None = None


def reader_of(file: Path, data: bytes) -> Callable[[Path, bytes], ForeignLog] | None:
    """Return the reader of a log by its name and first line; None for a seven-column CSV."""
    head = data[:4096].lstrip().partition(b"\n")[0]
    if "tfevents" in file.name:
        return tensorboard
    if head.startswith(b"{"):
        return llama_factory if b'"current_steps"' in head else trainer_state
    return wandb if re.search(rb'(^|,)"?(_step|Step|train/global_step)"?(,|$)', head.strip()) else None


def number(value: object, name: str = "") -> float | None:
    """Return a plausible number, or None. Older versions of some tools wrote numbers as text."""
    if type(value) is int or type(value) is float:
        if abs(value) < LARGEST:
            return float(value)
        return value if type(value) is float and name in _MAY_DIVERGE else None
    return None


def as_float(text: str) -> float | None:
    """Return the number in a text, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def rows_of(file: Path, entries: list[Entry], planned: float | None = None) -> list[StepRow]:
    """Return a row per step with a loss. Entries of the same step are merged; the first value of a key counts.

    Raises:
        SpecError: A step number is not valid.
    """
    merged: dict[tuple[str, int], Entry] = {}
    for raw in entries:
        entry = {key.lower().removeprefix("train/"): value for key, value in raw.items()}
        step = next((known for name in _STEP if (known := number(entry.get(name))) is not None), None)
        if step is None:
            continue
        if step < 0 or step % 1 or step >= MOST_STEPS:
            raise SpecError(f"{file}: {step:g} is not a valid step number")
        loss = entry.get("eval_loss", entry.get("eval/loss"))
        kind = "evaluate" if number(loss, "eval_loss") is not None and "loss" not in entry else "train"
        merged[kind, int(step)] = entry | merged.get((kind, int(step)), {})
    rows = [row for (kind, step), entry in merged.items() if (row := _row(kind, step, entry, planned)) is not None]
    return sorted(rows, key=lambda row: (row.step or 0, row.phase == "evaluate"))


def _row(kind: str, step: int, entry: Entry, planned: float | None) -> StepRow | None:
    row = StepRow(step=step, phase=kind, progress_ratio=step / planned if planned else None)
    if kind == "evaluate":
        row.epoch, row.step_time_s = number(entry.get("epoch")), number(entry.get("eval_runtime"))
        row.loss = number(entry.get("eval_loss", entry.get("eval/loss")), "eval_loss")
        return row
    for name, target in _FIELDS.items():
        if (value := number(entry.get(name), name)) is not None:
            setattr(row, target, value)
    return row if row.loss is not None else None


def _rows_with_loss(file: Path, entries: list[Entry], planned: float | None = None) -> list[StepRow]:
    if rows := rows_of(file, entries, planned):
        return rows
    raise SpecError(f"{file}: lacks a training loss; train with logging every few steps")


def trainer_state(file: Path, data: bytes) -> ForeignLog:
    """Read the Trainer's trainer_state.json."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            raise SpecError(f"{file}: unknown JSON lines; give the trainer_state.json instead") from None
        raise SpecError(f"{file}: not valid JSON ({json_problem(error)})") from None
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise SpecError(f"{file}: not a trainer_state.json of the Trainer: `log_history` is missing")
    rows = rows_of(file, history, number(state.get("max_steps")))
    if not rows:
        raise SpecError(f"{file}: its log_history lacks a loss; train with logging_steps")
    total: Entry = next((entry for entry in reversed(history) if number(entry.get("train_runtime"))), {})
    rate, batch = number(total.get("train_samples_per_second")), number(state.get("train_batch_size"))
    notes = [f"the Trainer's own rate, warm-up and evaluations included: {rate:g} samples/s"] if rate else []
    lacks = "step times, memory, tokens, energy and most of the recipe"
    if any(row.peak_memory_gb for row in rows):
        lacks = "step times, tokens, energy and most of the recipe"
    samples, runtime = int(batch) if batch and batch >= 1 else None, number(total.get("train_runtime"))
    return ForeignLog("a Trainer's trainer_state.json", rows, lacks, notes, samples, runtime, rate)


def llama_factory(file: Path, data: bytes) -> ForeignLog:
    """Read LLaMA-Factory's trainer_log.jsonl. Its times are in full seconds."""
    entries, total = [], None
    for line_number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        try:
            entry = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            raise SpecError(f"{file}: line {line_number} is not JSON") from None
        if isinstance(entry, dict):
            entries.append(entry | {"elapsed": _seconds(entry.get("elapsed_time"))})
            total = number(entry.get("total_steps")) or total
    rows = _rows_with_loss(file, entries, total)
    notes = ["its times are in full seconds, so the times of short steps are imprecise"]
    return ForeignLog("LLaMA-Factory's trainer_log.jsonl", rows, "memory, energy and most of the recipe", notes,
                      timed_from_zero=True)  # fmt: skip


def _seconds(text: object) -> float | None:
    """Return the seconds of `1 day, 2:03:04` or `0:03:04`."""
    match = re.fullmatch(r"(?:(\d{1,9}) days?, )?(\d{1,9}):(\d\d):(\d\d)", text) if isinstance(text, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def wandb(file: Path, data: bytes) -> ForeignLog:
    """Read a CSV of a W&B run (`_step`, `train/loss`) or of a panel with one run (`Step`, `NAME - train/loss`)."""
    csv.field_size_limit(2**17)  # global; reading a data set may have raised it
    try:
        lines = list(csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline="")))
    except csv.Error as error:
        raise SpecError(f"{file}: not valid CSV ({error})") from None
    names = [name for name in (lines[0] if lines else {}) if name and not name.endswith(("__MIN", "__MAX"))]
    short = {name: name.rpartition(" - ")[2] for name in names}
    if repeated := sorted({name for name in short.values() if list(short.values()).count(name) > 1}):
        raise SpecError(f"{file}: has several runs ({repeated[0]} appears more than once); export them one by one")
    entries = [{short[name]: as_float(line[name] or "") for name in names} for line in lines]
    entries = [{name: value for name, value in entry.items() if value is not None} for entry in entries]
    timed = any("_runtime" in entry for entry in entries)
    lacks = "tokens, energy and the recipe" if timed else "times, memory, tokens, energy and the recipe"
    rows = _rows_with_loss(file, entries)
    return ForeignLog("a table of W&B", rows, lacks, timed_from_zero=False if timed else None)


def tensorboard(file: Path, data: bytes) -> ForeignLog:
    """Read the scalars of an events file and when each was written. Raise MissingError without TensorBoard."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise MissingError(f"{file}: needs TensorBoard to be read: pip install tensorboard") from None
    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    except Exception:  # noqa: BLE001 - protobuf has its own errors
        raise SpecError(f"{file}: not an events file of TensorBoard") from None
    start = min((event.wall_time for series in scalars.values() for event in series), default=0.0)
    entries: dict[int, Entry] = {}
    for tag, series in scalars.items():
        for event in series:
            entry = entries.setdefault(event.step, {"step": event.step, "elapsed": event.wall_time - start})
            entry[tag] = event.value
    rows = _rows_with_loss(file, list(entries.values()))
    return ForeignLog("TensorBoard's events", rows, "tokens, energy and the recipe", timed_from_zero=False)
