"""Logs of other tools → entries under one set of names: a Trainer's (axolotl's with it), LLaMA-Factory's, torchtune's,
TensorBoard's and a table of W&B's."""

import csv
import io
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core.rows import LARGEST, MOST_STEPS, StepRow
from ftbench.errors import MissingError, SpecError, json_problem

Entry = dict[str, Any]
# Names without `train/`, in small letters → the field of a row. GiB in all of these tools.
_FIELDS = {
    "epoch": "epoch", "elapsed": "elapsed_time_sec", "_runtime": "elapsed_time_sec", "loss": "loss",
    "grad_norm": "grad_norm", "learning_rate": "learning_rate", "lr": "learning_rate",
    "memory/max_active (gib)": "peak_memory_gb", "memory/max_mem_active(gib)": "peak_memory_gb",
    "peak_memory_active": "peak_memory_gb", "memory/device_reserved (gib)": "peak_reserved_gb",
    "memory/device_mem_reserved(gib)": "peak_reserved_gb", "peak_memory_reserved": "peak_reserved_gb",
}  # fmt: skip
_STEP = ("global_step", "current_steps", "step", "_step")
_FINITE_OR_NOT = ("loss", "eval_loss", "grad_norm")  # NaN of a loss is a figure
_TORCHTUNE = re.compile(r"Step (\d{1,18}) \| (.*)")


@dataclass(slots=True)
class ForeignLog:
    """What a file says: its kind, its rows, what it lacks and what is to be known of it; the batch size, the seconds of
    the training and its samples a second where it tells them. `timed_from_zero` says whether its times begin with the
    training; without times None."""

    kind: str
    rows: list[StepRow]
    lacks: str
    notes: list[str] = field(default_factory=list)
    batch_size: int | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    timed_from_zero: bool | None = None


def reader_of(file: Path, data: bytes) -> Callable[[Path, bytes], ForeignLog] | None:
    """Return what reads a log, by its name and its first line; None for the founding study's CSV."""
    head = data[:4096].lstrip().partition(b"\n")[0]
    if "tfevents" in file.name:
        return tensorboard
    if head.startswith(b"{"):
        return llama_factory if b'"current_steps"' in head else trainer_state
    if _TORCHTUNE.match(head.decode("utf-8", "replace")):
        return torchtune
    return wandb if re.search(rb'(^|,)"?(_step|Step|train/global_step)"?(,|$)', head.strip()) else None


def number(value: object, name: str = "") -> float | None:
    """Return a number that a training has; what is none (older versions wrote some as text) is not known."""
    if type(value) is int or type(value) is float:
        if abs(value) < LARGEST:
            return float(value)
        return value if type(value) is float and name in _FINITE_OR_NOT else None
    return None


def _plain(entry: Entry) -> Entry:
    return {key.lower().removeprefix("train/"): value for key, value in entry.items()}


def rows_of(file: Path, entries: list[Entry], planned: float | None = None) -> list[StepRow]:
    """Return a row for each step with a loss, its entries together. Raise SpecError for a step that is none."""
    merged: dict[tuple[str, int], Entry] = {}
    for entry in map(_plain, entries):
        step = next((known for name in _STEP if (known := number(entry.get(name))) is not None), None)
        if step is None:
            continue
        if step < 0 or step % 1 or step >= MOST_STEPS:
            raise SpecError(f"{file}: step {step:g} of its log is no number of a step")
        loss = entry.get("eval_loss", entry.get("eval/loss"))
        kind = "evaluate" if number(loss, "eval_loss") is not None and "loss" not in entry else "train"
        of_step = merged.setdefault((kind, int(step)), {})
        of_step |= {
            name: value for name, value in entry.items() if name not in of_step
        }  # what came first is the step's
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


def _known_rows(file: Path, entries: list[Entry], planned: float | None = None) -> list[StepRow]:
    if rows := rows_of(file, entries, planned):
        return rows
    raise SpecError(f"{file}: holds no loss of a step, which the log of a training has: log it every few steps")


def trainer_state(file: Path, data: bytes) -> ForeignLog:
    """Read a trainer_state.json."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            raise SpecError(
                f"{file}: is a log in lines that are not known: give the trainer_state.json beside it"
            ) from None
        raise SpecError(f"{file}: is not JSON ({json_problem(error)})") from None
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise SpecError(f"{file}: has no `log_history`, which a Trainer's trainer_state.json has")
    rows = rows_of(file, history, number(state.get("max_steps")))
    if not rows:
        raise SpecError(f"{file}: its log_history holds no loss: train with logging_steps")
    total: Entry = next((entry for entry in reversed(history) if number(entry.get("train_runtime"))), {})
    rate, batch = number(total.get("train_samples_per_second")), number(state.get("train_batch_size"))
    notes = [f"the Trainer's own rate, warm-up and evaluations included: {rate:g} samples/s"] if rate else []
    lacks = "step times, memory, tokens, energy and most of the recipe"
    if any(row.peak_memory_gb for row in rows):
        lacks = "step times, tokens, energy and most of the recipe"
    samples, runtime = int(batch) if batch and batch >= 1 else None, number(total.get("train_runtime"))
    return ForeignLog("a Trainer's trainer_state.json", rows, lacks, notes, samples, runtime, rate)


def llama_factory(file: Path, data: bytes) -> ForeignLog:
    """Read a trainer_log.jsonl: losses, and times in whole seconds."""
    entries, total = [], None
    for number_of_line, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        try:
            entry = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            raise SpecError(f"{file}: line {number_of_line} is not JSON") from None
        if isinstance(entry, dict):
            entries.append(entry | {"elapsed": _clock(entry.get("elapsed_time"))})
            total = number(entry.get("total_steps")) or total
    rows = _known_rows(file, entries, total)
    notes = ["its times are whole seconds: steps of a short line are known no better"]
    return ForeignLog("LLaMA-Factory's trainer_log.jsonl", rows, "memory, energy and most of the recipe", notes,
                      timed_from_zero=True)  # fmt: skip


def _clock(text: object) -> float | None:
    """Return the seconds of `1 day, 2:03:04` or `0:03:04`."""
    match = re.fullmatch(r"(?:(\d{1,9}) days?, )?(\d{1,9}):(\d\d):(\d\d)", text) if isinstance(text, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def torchtune(file: Path, data: bytes) -> ForeignLog:
    """Read a log of torchtune's DiskLogger: `Step 1 | loss:1.5 lr:0.0001 tokens_per_second_per_gpu:900 …`."""
    entries: list[Entry] = []
    for line in data.decode("utf-8", "replace").splitlines():
        if match := _TORCHTUNE.match(line):
            pairs = (pair.rpartition(":") for pair in match[2].split())
            entries.append({"step": int(match[1])} | {name: as_float(value) for name, _, value in pairs})
    rates = sorted(rate for entry in entries if (rate := number(entry.get("tokens_per_second_per_gpu"))))
    notes = [f"torchtune's own rate: {rates[len(rates) // 2]:,.0f} tokens/s a GPU in the median"] if rates else []
    return ForeignLog("torchtune's log", _known_rows(file, entries), "step times, tokens, energy and the recipe", notes)


def as_float(text: str) -> float | None:
    """Return the number that a text is, None for another text."""
    try:
        return float(text)
    except ValueError:
        return None


def wandb(file: Path, data: bytes) -> ForeignLog:
    """Read a CSV of a W&B run's history (`_step`, `train/loss`), or of one in a panel (`Step`, `NAME - train/loss`)."""
    csv.field_size_limit(2**17)  # it is the process's: reading a data set may have raised it
    try:
        lines = list(csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline="")))
    except csv.Error as error:
        raise SpecError(f"{file}: is not CSV ({error})") from None
    names = [name for name in (lines[0] if lines else {}) if name and not name.endswith(("__MIN", "__MAX"))]
    short = {name: name.rpartition(" - ")[2] for name in names}
    if doubled := sorted({name for name in short.values() if list(short.values()).count(name) > 1}):
        raise SpecError(f"{file}: has several runs ({doubled[0]} stands in it more than once): export them one by one")
    entries = [{short[name]: as_float(line[name] or "") for name in names} for line in lines]
    entries = [{name: value for name, value in entry.items() if value is not None} for entry in entries]
    timed = any("_runtime" in entry for entry in entries)
    lacks = "tokens, energy and the recipe" if timed else "times, memory, tokens, energy and the recipe"
    return ForeignLog("a table of W&B", _known_rows(file, entries), lacks, timed_from_zero=False if timed else None)


def tensorboard(file: Path, data: bytes) -> ForeignLog:
    """Read an events file: scalars, and when each was written. Raise MissingError without TensorBoard."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise MissingError(f"{file}: is read by TensorBoard, which is not installed: pip install tensorboard") from None
    entries: dict[int, Entry] = {}
    begun = None
    for record in _records(file, data):
        try:
            event = Event.FromString(record)
        except Exception:  # noqa: BLE001 - protobuf has errors of its own
            raise SpecError(f"{file}: is no events file of TensorBoard") from None
        for value in event.summary.value:
            begun = event.wall_time if begun is None else begun
            entry = entries.setdefault(event.step, {"step": event.step, "elapsed": event.wall_time - begun})
            entry[value.tag] = value.simple_value if value.HasField("simple_value") else None
    rows = _known_rows(file, list(entries.values()))
    return ForeignLog("TensorBoard's events", rows, "tokens, energy and the recipe", timed_from_zero=False)


def _records(file: Path, data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length, its checksum, the record, its checksum; a torn end is left out."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if size > len(data):
            raise SpecError(f"{file}: is no events file of TensorBoard")
        if at + 16 + size > len(data):
            return
        yield data[at + 12 : at + 12 + size]
        at += 16 + size
