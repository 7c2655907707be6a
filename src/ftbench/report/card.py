"""The summary card of one run, printed at the end of `ftbench run`."""

from typing import Any

from ftbench.core import units
from ftbench.core.rows import RunSummary
from ftbench.core.table import folded, text_table
from ftbench.report.data.collect import named_path, speeds
from ftbench.spec.reading import as_text
from ftbench.store.rundir import RunDir, read_json
from ftbench.store.summary import UNKNOWN

_LABEL = 10  # width of the label column


def card(summary: RunSummary, run: RunDir) -> str:
    """Return the run's settings, figures and warnings as text."""
    title = f"{summary.run_id}: {summary.state}" + (f": {summary.reason}" if summary.reason else "")
    log = "" if summary.state == "ok" else f" (log: {run.log.name})"
    warnings = [("warning", text) for text in summary.warnings]
    lines = [*_lines(summary), *_resolved(run), *warnings, ("files", f"{named_path(run)}{log}")]
    rows = [("", label.ljust(_LABEL), text) for label, text in lines if text]
    return f"{folded(title)}\n{text_table(['', '', ''], rows)}"


def _lines(summary: RunSummary) -> list[tuple[str, str]]:
    steps, trained, bound = summary.steps, summary.parameters.get("trainable"), summary.bound
    verdict = bound.get("verdict")
    weights = f"({summary.weights} weights) " if summary.weights else ""
    what = f"{summary.method} of {summary.model} {weights}on {summary.gpu or 'the CPU'}"
    share = f"{units.parameters(trained)} of {units.parameters(summary.parameters.get('total'))} parameters"
    rates: dict[str, Any] = summary.tokens_per_s
    samples_per_hour, joules = speeds(summary)
    known = rates.get("real") is not None and rates.get("padded")
    judged = "reward_first" in summary.loss  # the loss of grpo is near zero by construction
    losses = {} if judged else {name: loss for name, loss in summary.loss.items() if not name.startswith("reward")}
    first, last = summary.loss.get("reward_first"), summary.loss.get("reward_last")
    padding = units.percent(1 - rates["real"] / rates["padded"]) if known else ""
    return [
        ("what", ", ".join([what, *(name for name in summary.optimizations if name != UNKNOWN)])),
        ("trained", share if trained else ""),
        ("steps", f"{steps['total']}, {steps.get('warmup', 0)} of them warm-up" if steps.get("total") else ""),
        ("step time", _step_time(summary.step_time_s)),
        ("forward", ", ".join(f"{part} {units.seconds(spent)}" for part, spent in summary.forward_s.items())),
        ("mean parts", ", ".join(f"{part} {units.seconds(spent)}" for part, spent in summary.parts_s.items())),
        ("first step", units.seconds(summary.first_step_s)),
        ("speed", _speed(summary, samples_per_hour)),
        ("ranks", _ranks(summary)),
        ("padding", f"{padding} of the computed positions are padding" if padding else ""),
        ("memory", _memory(summary.memory_gb)),
        ("model", _model(summary)),
        ("bound by", f"{', '.join([verdict, *bound['also']])}: {bound['why']}" if verdict else ""),
        ("energy", f"{units.rate(joules)} J per 1,000 samples (GPU only)" if joules else ""),
        ("loss", " → ".join(f"{name} {value:.3f}" for name, value in losses.items() if value is not None)),
        ("preferred", _preferred(summary.loss)),
        ("reward", "" if None in (first, last) else f"{first:.3f} in the first step, {last:.3f} in the last"),
    ]


def _resolved(run: RunDir) -> list[tuple[str, str]]:
    """Return the values that were chosen for `auto` settings. Settings with the same reason share a line."""
    reasons: dict[str, list[str]] = {}
    for key, made in (read_json(run.applied).get("resolved") or {}).items():
        reasons.setdefault(str(made["reason"]), []).append(f"{key} {as_text(made['value'])}")
    return [("auto", f"{', '.join(settings)} ({reason})") for reason, settings in reasons.items()]


def _preferred(figures: dict[str, float | None]) -> str:
    accuracy, margin = figures.get("reward_accuracy"), figures.get("reward_margin")
    if accuracy is None or margin is None:
        return ""
    return f"the chosen answer in {units.percent(accuracy)} of the last step's pairs, mean margin {margin:.3f} nats"


def _step_time(times: dict[str, Any]) -> str:
    if not times:
        return ""
    interval = times.get("ci95")
    between = " (95 %: {} to {})".format(*map(units.seconds, interval)) if interval and len(interval) == 2 else ""
    return f"{units.seconds(times['median'])} median{between}"


def _speed(summary: RunSummary, samples_per_hour: float | None) -> str:
    if not samples_per_hour:
        return ""
    tokens = units.rate(summary.tokens_per_s.get("real"))
    tokens = f"{tokens} real tokens/s, " if tokens else ""
    images = summary.images_per_s.get("images")
    shown = f", {units.rate(images)} images/s" if images else ""
    generated = units.rate(summary.tokens_per_s.get("generated"))
    apart = f"; {generated} generated tokens/s while generating" if generated else ""
    return f"{tokens}{units.rate(samples_per_hour)} samples/h{shown}{apart}"


def _ranks(summary: RunSummary) -> str:
    ranks, peak = summary.ranks, summary.ranks.get("spread", {}).get("peak_memory_gb")
    if not ranks:
        return ""
    parts = [f"{units.rate(rate)} real tokens/s each"] if (rate := ranks.get("tokens_per_s_per_gpu")) else []
    if peak:
        parts.append(f"{units.gibibytes(peak['lowest'])} to {units.gibibytes(peak['highest'])} GiB at the peak")
    skew = ranks.get("token_skew")
    parts += [f"{units.percent(skew)} of a step is spent waiting for the rank with the most tokens"] if skew else []
    if layers := ranks.get("layers"):
        parts.append(f"stages of {', '.join(map(str, layers))} layers")
    bubble = ranks.get("bubble")
    parts += [f"{units.percent(bubble)} of a pass is spent waiting for other stages"] if bubble else []
    return f"{ranks['count']}: " + ", ".join(parts)


def _memory(memory: dict[str, Any]) -> str:
    if not memory.get("allocated_peak"):
        return ""
    device = memory.get("device_peak")
    phase = (memory["peak_phase"] or "an unknown phase").replace("_", " ")
    peak = f"{units.gibibytes(memory['allocated_peak'])} GiB at the peak ({phase})"
    return peak + (f", {units.gibibytes(device)} GiB used on the device" if device else "")


def _model(summary: RunSummary) -> str:
    if not summary.model_tflops:
        return ""
    shares = [f"MFU {units.percent(summary.mfu)}"] if summary.mfu else []
    shares += [f"{units.percent(summary.mfu_measured)} of the measured rate"] if summary.mfu_measured else []
    return ", ".join([f"{units.tflops(summary.model_tflops)} TFLOP/s", *shares])
