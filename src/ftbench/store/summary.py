"""Compute summary.json from steps.csv and the other files of a run.

The parent process computes the summary, so killed runs also have a summary. Anyone can recompute a summary.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ftbench.core import hardware, stats, units
from ftbench.core.bottleneck import classify_bottleneck
from ftbench.core.rows import FIELDS, SCHEMA, RunSummary, StepRow
from ftbench.core.stats import total
from ftbench.store import rates, run_warnings, rundir
from ftbench.store.ranks import merge, read_ranks, spread, stages
from ftbench.store.rundir import RunDir, first_gpu, state_of
from ftbench.store.steps import read_steps

SHARED = "the GPU was shared with other runs (measure.share_gpu): speed, power and device memory are not valid"
_OF_IMAGES = ("images", "tiles", "image_tokens", "text_tokens")
UNKNOWN = "unknown"  # the optimizations of an imported run
PROFILED = "profiled: no speed is taken from this run, its steps were recorded (measure.profile)"


def read_summary(run: RunDir) -> dict[str, Any]:
    """Return the stored summary of a run. If it is missing, outdated or has another schema, compute a new summary.

    If the summary records NaN or infinite losses or gradient norms, the state is `not finite`. If a file of the run
    cannot be read, the state is `error` and the summary contains the reason.
    """
    documents, problem = read_documents(run)
    if problem:
        return as_dict(_described(run, documents, {"state": "error", "reason": f"cannot be read: {problem}"}))
    written = documents["summary"]
    state = state_of(documents["state"])["state"]
    current = written.get("schema") == SCHEMA and written.keys() >= FIELDS and written["state"] == state
    if not current:
        written = as_dict(summarise(run))
    if written["state"] != "ok" or written.get("learning", {}).get("state") != rundir.NOT_FINITE:
        return written
    reason = run_warnings.not_finite_reason(written["learning"], written["warnings"])
    return written | {"state": rundir.NOT_FINITE, "reason": reason}


def read_documents(run: RunDir) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return the JSON files of a run as {name in `RunDir`: content}, and a message about the first unreadable file."""
    documents, problems = {}, []
    for name in ("state", "spec_json", "machine", "applied", "phases", "summary"):
        documents[name], problem = rundir.read_document(getattr(run, name))
        problems += [problem] if problem else []
    try:
        rundir.open_plain_file(run.steps, rundir.MOST_CSV_BYTES).close()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problems.append(f"{run.steps.name}: {error}")
    return documents, problems[0] if problems else None


def summarise(run: RunDir, state: dict[str, Any] | None = None) -> RunSummary:
    """Compute the summary of a run from its files. If `state` is given, it replaces the content of state.json."""
    documents, _ = read_documents(run)
    spec, config, machine = documents["spec_json"], documents["applied"], documents["machine"]
    state = state or state_of(documents["state"])
    ranks, rank_warnings = read_ranks(run)
    everything, warnings = read_steps(run.steps)
    everything = everything or (merge(ranks) if ranks else [])
    train = [row for row in everything if row.phase == "train" and row.step_time_s is not None]
    warm = _warmup(spec, train)
    phases = documents["phases"].get("phases", [])
    summary = _described(run, documents, state)
    summary.steps = {"total": len(train), "warmup": min(warm, len(train)), "steady": len(train[warm:])}
    summary.loss = _losses(everything)
    summary.memory_gb = _memory(everything, train, warm, phases)
    summary.phases_s = _phases(phases, train, warm, state)
    summary.ranks = spread(ranks, warm) | stages(run, len(ranks))
    summary.warnings += [*warnings, *rank_warnings]
    loss_scaled = spec.get("train", {}).get("precision") == "fp16"
    summary.learning, sentences = run_warnings.learning(everything, loss_scaled, bool(machine.get("imported")))
    summary.warnings += sentences
    if spec.get("measure", {}).get("profile", "off") != "off":  # the profiler slows steps and launches
        summary.warnings += [PROFILED, *run_warnings.warnings(everything, [], 0, machine, {}, ended_well=False)]
        return summary
    _first_steps(summary, train, warm)
    if steady := train[warm:]:
        _speed(summary, steady)
        if rate := summary.tokens_per_s.get("real") if summary.ranks else None:
            summary.ranks["tokens_per_s_per_gpu"] = rate / summary.ranks["count"]
        _flops(summary, steady, documents)
        summary.energy, sentences = rates.energy(steady, machine)
        summary.warnings += sentences
        summary.drift = run_warnings.drift(steady)
        summary.outliers = run_warnings.outliers(steady)[: run_warnings.OUTLIERS_NAMED]
        summary.contention, sentences = run_warnings.contention(steady, on_gpu=summary.gpu is not None)
        summary.warnings += sentences
    elif rate := config.get("reported", {}).get("samples_per_s"):  # the imported log contains this rate
        summary.samples_per_s, summary.samples_per_hour = rate, rate * 3600
    timed = bool(train) or not everything  # an imported log may have losses without times
    summary.warnings += run_warnings.warnings(
        everything, train, warm, machine, summary.bound, ended_well=state["state"] == "ok" and timed
    )
    return summary


def _described(run: RunDir, documents: dict[str, dict[str, Any]], state: dict[str, Any]) -> RunSummary:
    """Return a summary with the names and settings of the run, but without figures."""
    spec, config = documents["spec_json"], documents["applied"]
    model, train = spec.get("model", {}), spec.get("train", {})
    shared = [SHARED] if spec.get("measure", {}).get("share_gpu") else []
    return RunSummary(
        name=spec.get("name", run.path.parent.name), run_id=run.run_id, state=state["state"],
        reason=state.get("reason"), method=spec.get("method", {}).get("name", ""), model=model.get("id", ""),
        weights=model.get("weights", ""), gpu=first_gpu(documents["machine"]).get("name"),
        batch_size=train.get("batch_size", 0),
        gradient_accumulation_steps=train.get("gradient_accumulation_steps", 0),
        optimizations=[UNKNOWN] if "imported" in spec else units.optimizations_on(spec.get("optimizations", {})),
        steps={},
        parameters={key: config.get("parameters", {}).get(key) for key in ("total", "trainable")},
        dataset=config.get("dataset", {}), oom=state.get("oom"), warnings=[*config.get("warnings", []), *shared],
        first_step_cache=(config["compile_cache"] or "none") if "compile_cache" in config else None,
    )  # fmt: skip


def _first_steps(summary: RunSummary, train: Sequence[StepRow], warm: int) -> None:
    """Set the times of the first step and of the warm-up, if these steps were recorded one by one.

    In an imported log, the first steps may be missing, or one line may be the mean of several steps.
    """
    if train and train[0].step == 1:
        summary.first_step_s = train[0].step_time_s
        if not warm or train[:warm][-1].step == warm:
            summary.time_to_steady_s = total(row.step_time_s for row in train[:warm])


def as_dict(summary: RunSummary) -> dict[str, Any]:
    return dataclasses.asdict(summary)


def _warmup(spec: dict[str, Any], train: Sequence[StepRow]) -> int:
    if isinstance(warmup := spec.get("measure", {}).get("warmup"), int):
        return warmup
    times, positions = [row.step_time_s or 0.0 for row in train], [row.padded_tokens or 0 for row in train]
    return stats.warmup_steps(times, [row.recompiles for row in train], positions)


def _speed(summary: RunSummary, steady: Sequence[StepRow]) -> None:
    times = [row.step_time_s or 0.0 for row in steady]
    window = sum(times)
    if window <= 0:
        return
    summary.step_time_s = stats.step_time(times)
    summary.tokens_per_s = {
        name: _rate([getattr(row, f"{name}_tokens") for row in steady], window) for name in ("real", "padded", "label")
    }
    if any(row.images for row in steady):
        per_s = {name: _rate([getattr(row, name) or 0 for row in steady], window) for name in _OF_IMAGES}
        summary.tokens_per_s |= {name: per_s[f"{name}_tokens"] for name in ("image", "text")}
        summary.images_per_s = {name: per_s[name] for name in ("images", "tiles")}
        parts = {part: [getattr(row, f"{part}_s") or 0.0 for row in steady] for part in ("vision", "language", "loss")}
        summary.forward_s = {part: total(spent) / len(spent) for part, spent in parts.items() if any(spent)}
    if any(row.generated_tokens for row in steady):
        summary.parts_s, tokens_per_s = rates.completion_rates(steady)
        summary.tokens_per_s |= tokens_per_s
    summary.samples_per_s = _rate([row.samples for row in steady], window)
    if summary.samples_per_s is not None:
        summary.samples_per_hour = summary.samples_per_s * 3600


def _rate(counts: Sequence[int | None], window: float) -> float | None:
    """Return sum(counts) / window, where the window is in seconds. Return None if a count is unknown."""
    return None if None in counts else total(counts) / window


def _flops(summary: RunSummary, steady: Sequence[StepRow], documents: dict[str, dict[str, Any]]) -> None:
    """Set model TFLOP/s, MFU, HFU and the bottleneck of `summary`.

    A utilization above 100 % means that a count or a table is wrong. The field then stays empty, and a warning is
    added."""
    config, machine = documents["applied"], documents["machine"]
    tflops = rates.tflops(steady, config, summary.dataset)
    precision = config.get("product_precision", "")
    gpu = hardware.find_gpu(summary.gpu) if summary.gpu else None
    count = summary.ranks.get("count") or documents["spec_json"].get("launch", {}).get("gpus", 1)  # no rank files
    probed = (machine.get("ceilings") or {}).get("tflops", {}).get(precision)
    peak, measured = (rate and rate * count for rate in (gpu.peak_tflops(precision) if gpu else None, probed))
    if tflops:
        summary.model_tflops = tflops[0]
        for name, rate, best, word in (
            ("mfu", tflops[0], peak, "dense peak"),
            ("hfu", tflops[1], peak, "dense peak"),
            ("mfu_measured", tflops[0], measured, "measured rate"),
        ):
            if best and rate > best:
                summary.warnings.append(
                    f"{name} would be {units.percent(rate / best, 0)} of the {word} of {best:.4g} TFLOP/s, which "
                    "cannot be: it is left out"
                )
            elif best:
                setattr(summary, name, rate / best)
    ceiling = measured or peak
    products = tflops[1] / ceiling if tflops and ceiling and tflops[1] <= ceiling else None
    bottleneck = classify_bottleneck(steady, summary.gpu is not None, products, config.get("gpu_busy_method"))
    summary.bound = dataclasses.asdict(bottleneck)


def _losses(everything: Sequence[StepRow]) -> dict[str, float | None]:
    finite = [(row.phase, row.loss) for row in everything if row.loss is not None and math.isfinite(row.loss)]
    trained, evaluated = ([loss for phase, loss in finite if phase == name] for name in ("train", "evaluate"))
    return {
        "first": next(iter(trained), None), "last": next(reversed(trained), None),
        "eval": next(reversed(evaluated), None), **rates.rewards(everything),
    }  # fmt: skip


def _memory(
    everything: Sequence[StepRow], train: Sequence[StepRow], warm: int, phases: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the memory peaks of a run and the phase with the highest allocated peak."""
    names = ["first_step", *["warmup"] * len(train[1:warm]), *["steady"] * len(train)]
    stages = [(name, row.peak_memory_gb) for name, row in zip(names, train, strict=False)]
    if not train:  # an imported log may have memory without times
        stages += [("steady", row.peak_memory_gb) for row in everything if row.phase == "train"]
    stages += [("evaluate", row.peak_memory_gb) for row in everything if row.phase == "evaluate"]
    stages += [(phase["name"], phase.get("peak_memory_gb")) for phase in phases]
    highest = max(((name, peak) for name, peak in stages if peak is not None), key=lambda s: s[1], default=(None, None))

    def peak(name: str) -> float | None:
        values = [getattr(row, name) for row in everything] + [phase.get(name) for phase in phases]
        return max((value for value in values if value is not None), default=None)

    return {
        "allocated_peak": highest[1],
        "reserved_peak": peak("peak_reserved_gb"),
        "device_peak": peak("device_memory_gb"),
        "host_peak": peak("host_memory_gb"),
        "peak_phase": highest[0],
    }


def _phases(
    phases: Sequence[dict[str, Any]], train: Sequence[StepRow], warm: int, state: dict[str, Any]
) -> dict[str, float]:
    """Return the seconds of each phase. Phases do not overlap, and their sum is the wall time (`total`).

    The phase `train` is split into first step, warm-up, steady steps and the rest. A phase without an end counts until
    the process was killed."""
    seconds: dict[str, float] = {}
    for phase in phases:
        if (end := phase.get("end_s", state.get("wall_s"))) is not None:
            seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + max(0.0, end - phase["start_s"])
    if "train" in seconds and train:
        split = {
            "first_step": train[0].step_time_s or 0.0,
            "warmup": total(row.step_time_s for row in train[1:warm]),
            "steady": total(row.step_time_s for row in train[max(warm, 1) :]),
        }
        seconds["train_other"] = max(0.0, seconds.pop("train") - sum(split.values()))
        seconds |= split
    if (wall := state.get("wall_s")) is not None:
        seconds["start_and_exit"] = max(0.0, wall - sum(seconds.values()))
        seconds["total"] = wall
    return seconds
