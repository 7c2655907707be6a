"""The details of a run on the page: figures, and facts of its spec, its applied configuration and its machine."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ftbench.core import units
from ftbench.report.data.facts import json_bytes, parse_json
from ftbench.report.page.view import RunRow
from ftbench.store.rundir import first_gpu

Pairs = tuple[tuple[str, str], ...]
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("median step", "step_time_s.median", units.seconds),
    ("first step", "first_step_s", units.seconds),
    ("until speed is steady", "time_to_steady_s", units.seconds),
    ("steps", "steps.total", units.count),
    ("samples per hour", "samples_per_hour", units.rate),
    ("real tokens/s", "tokens_per_s.real", units.rate),
    ("images/s", "images_per_s.images", units.rate),
    ("GiB allocated at the peak", "memory_gb.allocated_peak", units.gibibytes),
    ("GiB reserved at the peak", "memory_gb.reserved_peak", units.gibibytes),
    ("GiB used on the device at the peak", "memory_gb.device_peak", units.gibibytes),
    ("model TFLOP/s", "model_tflops", lambda value: f"{value:.3g}"),
    ("MFU", "mfu", units.percent),
    ("GPU busy", "bound.gpu_busy", units.percent),
    ("waiting for batches", "bound.data_wait", units.percent),
    ("joules per 1,000 samples, GPU only", "energy.joules_per_1k_samples", units.rate),
    ("mean watts, GPU only", "energy.mean_watts", units.rate),
    ("loss of the last step", "loss.last", lambda value: f"{value:.4f}"),
    ("evaluation loss", "loss.eval", lambda value: f"{value:.4f}"),
    ("trained", "parameters.trainable", lambda value: units.parameters(int(value))),
)
FIGURE_NAMES = [name for name, _, _ in _FIGURES]
# Only these fields of each file reach the page: label, section (empty: top level), keys.
_SHOWN: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "spec.json": (
        ("method", "method", ("name", "rank", "alpha", "dropout", "targets", "double_quant", "quant_type",
                              "compute_dtype")),
        ("train", "train", ("batch_size", "gradient_accumulation_steps", "epochs", "max_steps", "learning_rate",
                            "optimizer", "max_grad_norm", "precision", "scheduler", "seed")),
    ),
    "applied.json": (
        ("model", "model", ("class", "attention", "layers")), ("optimizer", "optimizer", ("class", "fused")),
        ("", "", ("product_precision", "autocast", "gradient_checkpointing", "loss", "fp8_layers", "compiled_graphs",
                  "compile_cache")),
    ),
    "machine.json": (
        ("GPU", "gpu", ("name", "driver", "power_limit_w", "sm_clock_max_mhz", "mig")),
        ("CPU", "cpu", ("model", "cores")), ("ftbench", "ftbench", ("version", "commit")),
        ("", "versions", ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "unsloth",
                          "liger-kernel")),
    ),
}  # fmt: skip


def figures_of(row: RunRow) -> list[str]:
    """Return the figures of a run as texts in the order of FIGURE_NAMES, empty if unknown."""
    values = [row.record.get(source) for _, source, _ in _FIGURES]
    return [
        text(float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else ""
        for value, (_, _, text) in zip(values, _FIGURES, strict=True)
    ]


def facts_of(row: RunRow) -> tuple[Pairs, ...]:
    """Return labels and texts of the spec, the applied configuration and the machine."""
    return _facts_of(*(json_bytes(row.folder / name) for name in _SHOWN))


@lru_cache(maxsize=8192)  # repeats share their files' contents
def _facts_of(*texts: bytes) -> tuple[Pairs, ...]:
    requested, applied, machine = map(parse_json, texts, _SHOWN)
    machine = {**machine, "gpu": first_gpu(machine)}
    model, kinds = applied.get("model", {}), applied.get("parameters", {}).get("by_kind", {})
    more: tuple[dict[str, str], ...] = (
        {
            f"optimizations {name.replace('_', ' ')}": _text(value)
            for name, value in requested.get("optimizations", {}).items() if value not in (False, "off", None)
        },
        {
            "weights, GiB": _listed(model.get("weights_gb_by_dtype", {}), units.gibibytes),
            "optimizer state": _listed(applied.get("optimizer", {}).get("state", {}), str),
            "trained": _listed({kind: line.get("trainable") for kind, line in kinds.items()}, units.parameters),
        },
        {"GPU memory": _listed({"GiB": machine["gpu"].get("memory_gb")}, units.gibibytes)},
    )  # fmt: skip
    return tuple(
        (*_pairs(document, shown), *((label, text) for label, text in texts.items() if text))
        for document, shown, texts in zip((requested, applied, machine), _SHOWN.values(), more, strict=True)
    )


def _pairs(document: Mapping[str, Any], sections: tuple[tuple[str, str, tuple[str, ...]], ...]) -> Pairs:
    return tuple(
        (f"{label} {name.replace('_', ' ')}".strip(), _text(part[name]))
        for label, section, names in sections for part in (document.get(section, {}) if section else document,)
        for name in names if isinstance(part.get(name), (str, int, float, list))
    )  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(values: dict[str, Any], text: Callable[[Any], str]) -> str:
    return "; ".join(f"{name} {text(value)}" for name, value in values.items() if value)
