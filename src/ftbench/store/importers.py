"""Convert logs of other tools to run directories for reports. Unknown fields stay empty.

Two formats are supported: trainer_state.json of the Hugging Face Trainer (also from axolotl and LLaMA-Factory), and a
CSV with seven columns (of the study that preceded ftbench). These files do not contain the GPU, the model and the
method. The user gives this information on the command line.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core.rows import LARGEST, MOST_STEPS, StepRow
from ftbench.errors import SpecError, file_problem
from ftbench.spec.experiment import experiment_name
from ftbench.spec.identity import model_slug
from ftbench.spec.methods import METHODS
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter, read_steps

COLUMNS = ("step", "epoch", "elapsed_time_sec", "progress_ratio", "memory_allocated_gb", "memory_reserved_gb",
           "peak_memory_gb")  # fmt: skip
_NEEDED = ("step", "elapsed_time_sec")
# Columns by the keys of trainer_state.json. axolotl reports GiB.
_FIELDS = {
    "epoch": "epoch", "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate",
    "memory/max_active (GiB)": "peak_memory_gb", "memory/device_reserved (GiB)": "peak_reserved_gb",
}  # fmt: skip
_MAY_DIVERGE = ("loss", "eval_loss", "grad_norm")  # may be NaN


@dataclass(frozen=True, slots=True)
class About:
    """The description of an imported run from the command line. `gpu` is None for a CPU."""

    name: str
    model: str
    method: str
    gpu: str | None
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    dataset: str | None = None


@dataclass(slots=True)
class ForeignLog:
    """The content of another tool's log. `rows` has one row per logged step. `lacks` names missing figures. `notes` are
    warnings. `train_s` is the training time, and `samples_per_s` is the rate that the tool logged."""

    kind: str
    rows: list[StepRow]
    lacks: str
    notes: list[str] = field(default_factory=list)
    batch_size: int | None = None
    train_s: float | None = None
    samples_per_s: float | None = None


def import_run(file: Path, about: About, out: Path) -> RunDir:
    """Convert a log to a run directory and return the run.

    Raises:
        SpecError: The file is not a known log, is broken, or was imported before.
    """
    try:
        experiment_name(about.name)
    except ValueError as error:
        raise SpecError(f"import: --name {about.name!r:.90} {error}") from None
    for option, text in {"--model": about.model, "--gpu": about.gpu}.items():
        if text is not None and not text.strip():
            raise SpecError(f"import: {option} is empty: name the model, and the GPU or cpu")
    if about.method not in METHODS:
        raise SpecError(f"import: {about.method!r} is not a method (allowed: {', '.join(METHODS)})")
    try:
        data = rundir.read_bytes(file).removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Excel
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: {file_problem(error) if isinstance(error, OSError) else error}") from None
    digest = hashlib.sha256(data).hexdigest()
    log = _trainer_state(file, data) if data.lstrip().startswith(b"{") else _seven_columns(file, data, about)
    batch = about.batch_size or log.batch_size
    if batch is None:
        raise SpecError(f"{file}: has no batch size; add --batch-size")
    identity = hashlib.sha256(json.dumps([digest, about.gpu, about.model]).encode()).hexdigest()[:12]
    slug = f"{model_slug(about.model)}-{about.method}-b{batch}-{identity}-r1"
    try:
        run = rundir.create_at(out / about.name / slug)
    except FileExistsError:
        raise SpecError(f"{file}: was imported before, as {out / about.name / slug}; delete it to repeat") from None
    try:
        _write(run, file.name, digest, about, log, batch)
    finally:
        run.reserve.unlink(missing_ok=True)
    return run


def _write(run: RunDir, source: str, digest: str, about: About, log: ForeignLog, batch: int) -> None:
    origin = {"from": log.kind, "file": source, "sha256": digest}
    data = {"name": about.dataset} if about.dataset is not None else {}
    rundir.write_json(run.spec_json, {
        "schema": rundir.SCHEMA, "name": about.name, "model": {"id": about.model}, "method": {"name": about.method},
        "train": {"batch_size": batch, "gradient_accumulation_steps": about.gradient_accumulation_steps},
        **({"dataset": data} if data else {}), "imported": origin,
    })  # fmt: skip
    gpus = [{"name": about.gpu}] if about.gpu else []
    rundir.write_json(run.machine, {"schema": rundir.SCHEMA, "gpus": gpus, "imported": True})
    warning = f"imported from {source} ({log.kind}), not recorded by ftbench: {log.lacks} are not known"
    facts = {"schema": rundir.SCHEMA, "imported": origin, "dataset": data, "warnings": [warning, *log.notes]}
    if log.samples_per_s is not None:
        facts["reported"] = {"samples_per_s": log.samples_per_s}
    rundir.write_json(run.applied, facts)
    with closing(StepsWriter(run.steps)) as writer:
        writer.append(log.rows)
    if log.train_s is not None:
        phase = {"name": "train", "start_s": 0.0, "end_s": log.train_s}
        rundir.write_json(run.phases, {"schema": rundir.SCHEMA, "phases": [phase]})
    state = {"schema": rundir.SCHEMA, "state": "ok", "imported": origin}
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run, state)))
    rundir.write_json(run.state, state)


def _seven_columns(file: Path, data: bytes, about: About) -> ForeignLog:
    header = data.partition(b"\n")[0].decode("utf-8", "replace").strip().split(",")
    if missing := [name for name in _NEEDED if name not in header]:
        raise SpecError(
            f"{file}: not a trainer_state.json or a CSV with the columns {', '.join(COLUMNS)} (missing in its first "
            f"line: {', '.join(missing)})"
        )
    rows, notes = read_steps(file, ended=True)
    rows = [row for row in rows if row.phase in (None, "train")]
    if not rows:
        raise SpecError(f"{file}: contains no training step" + (f" ({notes[0]})" if notes else ""))
    for row in rows:
        row.phase = "train"
    step_samples = about.batch_size and about.batch_size * about.gradient_accumulation_steps
    if (every := _time(file, rows, step_samples)) > 1:
        notes.append(f"a line is the mean of up to {every} steps: the times of single steps are unknown")
    if step_samples:
        notes.append("each step counts as a full batch, also the last one of an epoch")
    lacks = "tokens, losses, energy and the recipe"
    return ForeignLog("the founding study's seven-column CSV", rows, lacks, notes)


def _time(file: Path, rows: Sequence[StepRow], samples: int | None) -> int:
    """Set the step time of each row: the mean time per step since the last row with an earlier time. With rounded
    times, several rows can have the same time. Return the largest number of steps in a mean."""
    last, begin, begun, most, waiting = 0, 0, 0.0, 1, list[StepRow]()
    for row in rows:
        step, elapsed = row.step, row.elapsed_time_sec
        if step is None or elapsed is None:
            raise SpecError(f"{file}: the line after step {last} has no step number or no time")
        if step <= last or elapsed < begun:
            raise SpecError(f"{file}: goes back from step {last} to {step}; a file must have one run")
        last = int(step)
        waiting.append(row)
        if elapsed > begun:
            for each in waiting:
                each.step_time_s, each.samples = (elapsed - begun) / (last - begin), samples
            most, begin, begun, waiting = max(most, last - begin), last, elapsed, []
    return most


def _trainer_state(file: Path, data: bytes) -> ForeignLog:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file}: not valid JSON ({error})") from None
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise SpecError(f"{file}: not a trainer_state.json of the Trainer: `log_history` is missing")
    rows = _rows_of(file, history, _number(state.get("max_steps")))
    if not any(row.phase == "train" for row in rows):
        raise SpecError(f"{file}: its log_history contains no loss; train with logging_steps")
    total: dict[str, Any] = next((entry for entry in reversed(history) if _number(entry.get("train_runtime"))), {})
    rate, batch = _number(total.get("train_samples_per_second")), _number(state.get("train_batch_size"))
    notes = [f"the Trainer's own rate, warm-up and evaluations included: {rate:g} samples/s"] if rate else []
    memory = "" if any(row.peak_memory_gb for row in rows) else "memory, "
    lacks = f"step times, {memory}tokens, energy and most of the recipe"
    samples, runtime = int(batch) if batch and batch >= 1 else None, _number(total.get("train_runtime"))
    return ForeignLog("a Trainer's trainer_state.json", rows, lacks, notes, samples, runtime, rate)


def _rows_of(file: Path, history: Sequence[dict[str, Any]], planned: float | None) -> list[StepRow]:
    """Return one row per entry of `log_history` with a loss. Raise SpecError for an invalid step number."""
    rows = []
    for entry in history:
        step = _number(entry.get("step"))
        if step is None:
            continue
        if step < 0 or step % 1 or step >= MOST_STEPS:
            raise SpecError(f"{file}: {step:g} is not a valid step number")
        row = StepRow(step=int(step), phase="train", progress_ratio=step / planned if planned else None)
        if "eval_loss" in entry and "loss" not in entry:
            row.phase, row.epoch = "evaluate", _number(entry.get("epoch"))
            row.loss, row.step_time_s = _number(entry["eval_loss"], "eval_loss"), _number(entry.get("eval_runtime"))
        else:
            for name, column in _FIELDS.items():
                setattr(row, column, _number(entry.get(name), name))
        if row.loss is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: (row.step or 0, row.phase == "evaluate"))


def _number(value: object, name: str = "") -> float | None:
    """Return `value` if it is a number of plausible size, otherwise None. A loss or gradient norm may also be NaN."""
    if type(value) is int or type(value) is float:
        if abs(value) < LARGEST:
            return float(value)
        return value if type(value) is float and name in _MAY_DIVERGE else None
    return None
