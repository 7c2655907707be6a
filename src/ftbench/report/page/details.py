"""What opens for one run: its figures, what was asked for and really ran, the machine. Only named fields reach the
page: no environment, no path, no log."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ftbench.core import units
from ftbench.report.data.facts import cleaned, json_bytes
from ftbench.report.page.figures import FIGURES, number
from ftbench.report.page.view import RunRow
from ftbench.store.rundir import first_gpu

Pairs = tuple[tuple[str, str], ...]

# What opens of each file: label, section (empty for the document itself), keys.
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


def figures(row: RunRow) -> tuple[list[str], list[float | None]]:
    """Return the texts of FIGURES, in their order, empty where unknown, and the numbers to sort them by."""
    values = [number(row.record.get(source)) for _, source, _ in FIGURES]
    texts = ["" if value is None else text(value) for value, (_, _, text) in zip(values, FIGURES, strict=True)]
    if row.interval and texts[0]:
        low, high = map(units.seconds, row.interval)
        texts[0] += f" (95 %: {low} to {high})"
    return texts, [None if value is None else float(f"{value:.4g}") for value in values]


def facts(row: RunRow) -> tuple[Pairs, ...]:
    """Return what was asked for, what really ran, and the machine, as labels and texts."""
    return _facts(*(json_bytes(row.folder / name) for name in _SHOWN))


@lru_cache(maxsize=8192)  # repeats have the same
def _facts(*texts: bytes) -> tuple[Pairs, ...]:
    requested, applied, machine = map(cleaned, texts, _SHOWN)
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
