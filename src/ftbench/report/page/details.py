"""What opens for one run: its figures, what was asked for and really ran, the machine. Only named fields reach the
page: no environment, no path, no log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.redact import clean
from ftbench.report.page.view import RunRow, number
from ftbench.store.rundir import RunDir, read_json

Pairs = list[tuple[str, str]]

FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("median step", "step_time_s.median", units.seconds),
    ("fastest tenth of the steps, at most", "step_time_s.p10", units.seconds),
    ("slowest tenth, at least", "step_time_s.p90", units.seconds),
    ("first step", "first_step_s", units.seconds),
    ("until speed is steady", "time_to_steady_s", units.seconds),
    ("steps", "steps.total", units.count),
    ("of which steady", "steps.steady", units.count),
    ("samples per hour", "samples_per_hour", units.rate),
    ("real tokens/s", "tokens_per_s.real", units.rate),
    ("positions computed/s, padding included", "tokens_per_s.padded", units.rate),
    ("tokens with loss/s", "tokens_per_s.label", units.rate),
    ("GiB allocated at the peak", "memory_gb.allocated_peak", units.gibibytes),
    ("GiB reserved at the peak", "memory_gb.reserved_peak", units.gibibytes),
    ("GiB used on the device at the peak", "memory_gb.device_peak", units.gibibytes),
    ("GiB of the host's memory at the peak", "memory_gb.host_peak", units.gibibytes),
    ("model TFLOP/s", "model_tflops", lambda value: f"{value:.3g}"),
    ("MFU", "mfu", units.percent),
    ("HFU", "hfu", units.percent),
    ("MFU against the measured product rate", "mfu_measured", units.percent),
    ("GPU busy", "bound.gpu_busy", units.percent),
    ("waiting for batches", "bound.data_wait", units.percent),
    ("joules per 1,000 samples, GPU only", "energy.joules_per_1k_samples", units.rate),
    ("mean watts, GPU only", "energy.mean_watts", units.rate),
    ("idle watts", "energy.idle_watts", units.rate),
    ("loss of the first step", "loss.first", lambda value: f"{value:.4f}"),
    ("loss of the last step", "loss.last", lambda value: f"{value:.4f}"),
    ("evaluation loss", "loss.eval", lambda value: f"{value:.4f}"),
    ("parameters", "parameters.total", lambda value: units.parameters(int(value))),
    ("trained", "parameters.trainable", lambda value: units.parameters(int(value))),
    ("wall time", "phases_s.total", units.seconds),
)
_TRAIN = (
    "batch_size", "gradient_accumulation_steps", "epochs", "max_steps", "learning_rate", "optimizer", "max_grad_norm",
    "precision", "scheduler", "seed",
)  # fmt: skip
_METHOD = ("name", "rank", "alpha", "dropout", "targets", "double_quant", "quant_type", "compute_dtype")


def figures(row: RunRow) -> list[str]:
    """Return the texts of FIGURES, in their order; empty where unknown."""
    values = [(number(row.record.get(source)), text) for _, source, text in FIGURES]
    texts = [text(value) if value is not None else "" for value, text in values]
    if row.interval and texts[0]:
        low, high = map(units.seconds, row.interval)
        texts[0] += f" (95 %: {low} to {high})"
    return texts


def facts(row: RunRow) -> list[Pairs]:
    """Return what was asked for, what really ran, and the machine, as labels and texts."""
    path = folder(row)
    files = ((requested, "spec_json"), (applied, "applied"), (machine, "machine"))
    return [pairs(clean(read_json(getattr(RunDir(path), name)))) for pairs, name in files] if path else [[], [], []]


def folder(row: RunRow) -> Path | None:
    """Return where the run's files are, if the frame says so."""
    path = row.record.get("path")
    return Path(path) if isinstance(path, str) else None


def requested(spec: dict[str, Any]) -> Pairs:
    """Return named keys of the resolved spec, and the optimizations that are on."""
    pairs = _pairs(_section(spec, "method"), _METHOD, "method")
    pairs += _pairs(_section(spec, "train"), _TRAIN, "train")
    on = {key: value for key, value in _section(spec, "optimizations").items() if value not in (False, "off", None)}
    return pairs + _pairs(on, tuple(on), "optimizations")


def applied(values: dict[str, Any]) -> Pairs:
    """Return what was read back from the live objects."""
    model, optimizer = _section(values, "model"), _section(values, "optimizer")
    pairs = _pairs(model, ("class", "attention", "layers"), "model")
    pairs += _counts("weights, GiB", _section(model, "weights_gb_by_dtype"), lambda v: units.gibibytes(number(v)))
    pairs += _pairs(optimizer, ("class", "fused"), "optimizer")
    pairs += _counts("optimizer state", _section(optimizer, "state"), str)
    pairs += _pairs(values, ("product_precision", "autocast", "gradient_checkpointing", "loss", "fp8_layers",
                             "compiled_graphs", "compile_cache"), "")  # fmt: skip
    kinds = _section(_section(values, "parameters"), "by_kind")
    trained = {kind: count.get("trainable") for kind, count in kinds.items() if isinstance(count, dict)}
    return pairs + _counts("trained", {kind: count for kind, count in trained.items() if count}, _parameters)


def machine(values: dict[str, Any]) -> Pairs:
    """Return GPU, driver, limits and library versions; neither names nor environment of the host."""
    gpu, commit = _section(values, "gpu"), _section(values, "ftbench")
    pairs = _pairs(gpu, ("name", "driver", "power_limit_w", "sm_clock_max_mhz", "mig"), "GPU")
    pairs += _counts("GPU memory", {"GiB": gpu.get("memory_gb")}, lambda v: units.gibibytes(number(v)))
    pairs += _pairs(_section(values, "cpu"), ("model", "cores"), "CPU")
    pairs += _pairs(commit, ("version", "commit"), "ftbench")
    wanted = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "unsloth", "liger-kernel")
    return pairs + _pairs(_section(values, "versions"), wanted, "")


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _pairs(values: dict[str, Any], names: tuple[str, ...], prefix: str) -> Pairs:
    known = [(name, values[name]) for name in names if isinstance(values.get(name), (str, int, float, bool, list))]
    return [(f"{prefix} {name.replace('_', ' ')}".strip(), _text(value)) for name, value in known]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _counts(label: str, values: dict[str, Any], text: Callable[[Any], str]) -> Pairs:
    listed = [f"{name} {text(value)}" for name, value in values.items() if value is not None]
    return [(label, "; ".join(listed))] if listed else []


def _parameters(value: Any) -> str:
    return units.parameters(int(value)) if isinstance(value, (int, float)) else ""
