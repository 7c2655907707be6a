"""Settings, machine and applied configuration of a run as flat facts, for comparisons.

Keys are spec keys (`train.batch_size`) and other names, such as `gpu`, `driver`, `power limit`, `commit`,
`versions.torch`, `applied.attention` and `dataset.order_hash`. Values are text. Unknown facts are absent.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from pydantic_core import PydanticUndefined

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import METHODS
from ftbench.spec.reading import as_text
from ftbench.store.machine import short
from ftbench.store.rundir import RunDir, first_gpu, gpus_of, read_json

CPU = "none (CPU)"
_KEPT_OF_LAUNCH = ("framework", "settings", "mock", "mock_fits", "gpus", "nodes", "strategy", "tp", "offload", "pp",
                   "micro_batches", "schedule", "split")  # fmt: skip
# Keys that do not change the result.
_IGNORED = {"schema", "set", "name", "train.report_to", "measure.save_adapter", "measure.repeats",
            "measure.profile_steps", "measure.keep_weights", "imported.file", "imported.sha256"}  # fmt: skip
LIMIT, CARD, COMMIT = "power limit", "card", "commit"
REWARD = "applied.reward_sha256"  # hashes of the files with reward functions
_MIN_SHARE = 0.05  # smallest share of the bytes of all weights
IMPORTED = "imported.from"  # the kind of log that a run was imported from
_NOT_COMPARED = ("nvidia-ml-py", "unsloth", "unsloth_zoo", "xformers", "liger-kernel", "triton_kernels")
_ENVIRONMENT = ("PYTORCH_", "CUDA_LAUNCH", "NVIDIA_TF32", "TORCHINDUCTOR_", "TORCH_ALLOW_TF32", "OMP_NUM_THREADS")
_APPLIED = ("attention", "product_precision", "loss", "fp8_layers", "gradient_checkpointing", "compiled_graphs",
            "trained_dtype", "loss_normalisation", "padding", "patched_by")  # fmt: skip


def spec_facts(run: RunDir) -> Mapping[str, str]:
    """Return the settings of a run as {key: text}. Keys that do not change the result are left out.

    Paths are reduced to file names. If an older version of ftbench lacked a key, the current default is used, because
    that version behaved in the same way. The exception is `method.padded`: older unsloth runs padded their batches. A
    removed key is left out if its value was off.
    """
    written = read_json(run.spec_json)
    facts = {key: as_fact(key, value) for key, value in flat(written) if _matters(key)}
    if facts.get("launch.mock", "off") == "off":
        facts.pop("launch.mock", None)
        facts.pop("launch.mock_fits", None)
    if not facts or "imported" in written:  # defaults are unknown for imported runs
        return facts
    today = _defaults(facts.get("method.name", ""))
    facts = {key: text for key, text in facts.items() if key in today or text not in ("off", "none", "0")}
    known = {key: text for key, text in today.items() if isinstance(written.get(key.partition(".")[0]), dict)}
    older = {"objective.name": "sft"}  # how runs trained before these keys existed
    if not {"on"} & {facts.get(f"optimizations.{name}") for name in ("packing", "padding_free")}:
        older |= {"method.padded": "on"} if facts.get("method.name") == "unsloth" else {}
    return known | older | facts


def machine_facts(run: RunDir) -> Mapping[str, str]:
    """Return facts about the machine and the applied configuration as {key: text}. Unknown keys are absent."""
    facts = _machine(read_json(run.machine)) | _applied(read_json(run.applied))
    return {key: value if isinstance(value, str) else as_text(value)
            for key, value in facts.items() if value not in (None, "")}  # fmt: skip


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    gpu, versions, environment = first_gpu(machine), machine.get("versions", {}), machine.get("environment", {})
    limit, highest = gpu.get("power_limit_w"), gpu.get("power_limit_max_w")
    version = (ftbench := machine.get("ftbench", {})).get("version")
    cards = sorted(str(each["uuid"])[:12] for each in gpus_of(machine) if each.get("uuid"))
    return {
        CARD: ", ".join(cards) or (None if gpu else machine.get("cpu", {}).get("model")),
        "driver": gpu.get("driver"),
        LIMIT: None if limit is None else f"{limit:g} W" + ("" if highest is None else f" of {highest:g} W"),
        "mig": "on" if gpu.get("mig") else None,
        "shared host": "yes" if machine.get("shared_host") else None,
        COMMIT: short(commit) if (commit := ftbench.get("commit")) else version and f"release {version}",
        "python": machine.get("os", {}).get("python"),
        **{f"versions.{name}": version for name, version in versions.items() if name not in _NOT_COMPARED},
        **{f"environment.{name}": value for name, value in environment.items() if name.startswith(_ENVIRONMENT)},
    }


def _applied(applied: Mapping[str, Any]) -> dict[str, Any]:
    values = applied.get("model", {}) | {name: applied[name] for name in _APPLIED if name in applied}
    data, optimizer = applied.get("dataset", {}), applied.get("optimizer", {})
    return {
        "dataset.hash": (data.get("hash") or "")[:12],
        "dataset.order_hash": (data.get("order_hash") or "")[:12],
        **{f"applied.{name}": values.get(name) for name in _APPLIED},
        REWARD: applied.get("generation", {}).get("reward_sha256"),
        "applied.weights_dtype": _dtypes(applied.get("model", {}).get("weights_gb_by_dtype", {})),
        "applied.optimizer": optimizer.get("class"),
        "applied.optimizer_state": ", ".join(sorted(optimizer.get("state") or ())),
        "applied.trainable": applied.get("parameters", {}).get("trainable"),
    }


def _dtypes(gib: Mapping[str, Any]) -> str:
    """Return the dtypes of the weights. Dtypes with a small share are skipped, such as dtypes of adapters and
    norms."""
    known = {name: amount for name, amount in gib.items() if amount}
    return ", ".join(sorted(name for name, amount in known.items() if amount >= _MIN_SHARE * sum(known.values())))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value of a nested dict. A histogram is one value."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "histogram":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _matters(key: str) -> bool:
    section, _, rest = key.partition(".")
    if section == "launch" and rest not in _KEPT_OF_LAUNCH:
        return False
    return key not in _IGNORED


def as_fact(key: str, value: Any) -> str:
    """Convert the value of a key to text for comparisons."""
    if value is None:
        return "none"
    if key.endswith(".path"):
        return PurePosixPath(str(value)).name
    if key == "objective.reward":  # path/to/file.py:function, or a list of these
        return " + ".join(PurePosixPath(str(each)).name for each in (value if isinstance(value, list) else [value]))
    return value if isinstance(value, str) else as_text(value)


@cache
def _defaults(method: str) -> dict[str, str]:
    """Return the current default values of all spec keys as text."""
    sections = {
        name: field.annotation for name, field in Experiment.model_fields.items() if name not in ("method", "objective")
    }
    parts = sections | {"method": METHODS.get(method)}
    return {
        f"{name}.{key}": as_fact(key, list(field.default) if isinstance(field.default, tuple) else field.default)
        for name, part in parts.items()
        for key, field in getattr(part, "model_fields", {}).items()
        if field.default is not PydanticUndefined and _matters(f"{name}.{key}") and not key.startswith("mock")
    }
