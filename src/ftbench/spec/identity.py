"""Which runs are the same experiment: a readable slug and a hash of what changes the result."""

import hashlib
import json
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.spec import rewards
from ftbench.spec.experiment import Experiment

_END = 1 << 20  # bytes of each end of a file that are hashed
# What makes a model's tokens of texts and images (transformers, of any version and kind of tokenizer).
_TOKENIZER = (
    "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.json",
    "merges.txt", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json",
)  # fmt: skip
_AS_TEXT = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


_NOT_MEASURED = {"warmup", "save_adapter", "repeats", "profile_steps", "generate"}
_NOT_LAUNCHED = {"python", "timeout_s", "no_step_s", "mock", "mock_fits"}
_NO_MATTER = {"launch": _NOT_LAUNCHED, "measure": _NOT_MEASURED, "train": {"report_to"}}


def _relevant(spec: Experiment, known: dict[int, Any]) -> dict[str, Any]:
    """Return the spec without its name, its timeouts, which steps are called warm-up, how often it is run, and where
    files lie: of a file its name and content count, so that the same spec on two machines is the same experiment and an
    edited file another. A mock is no result of the spec at all: what it pretends counts.

    What is as it is by default is left out, so that a key which a later version brings, off by default, leaves the
    experiments of today what they are."""
    sections = {name: getattr(spec, name) for name in type(spec).model_fields if name != "name"}
    for name, section in sections.items():
        if id(section) not in known:
            known[id(section)] = section.model_dump(mode="json", exclude=_NO_MATTER.get(name), exclude_defaults=True)
    values: dict[str, Any] = {name: {**known[id(section)]} for name, section in sections.items()}
    values["method"]["name"] = spec.method.name
    values["objective"] |= {} if spec.objective.name == "sft" else {"name": spec.objective.name}
    for part in ("model", "dataset"):
        if path := values[part].get("path"):
            values[part]["path"] = _content(Path(path))
    if spec.model.path and spec.model.weights == "pretrained":
        values["model"]["path"] += _learned(Path(spec.model.path))
    if own := values["objective"].get("reward"):
        values["objective"]["reward"] = [[*_content(file), name] for file, name in map(rewards.parts, own)]
    if spec.launch.mock != "off":
        values["mock"] = [spec.launch.mock, spec.launch.mock_fits]
    return {key: value for key, value in values.items() if value != {}}


def _content(path: Path) -> list[str | int]:
    """Name, size and a hash of both ends of a file; of a directory its name and its config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        status = file.stat()
        if stat.S_ISREG(status.st_mode):  # reading a pipe waits for ever
            return [path.name, status.st_size, _ends(file, status.st_size, status.st_mtime_ns)]
    except (OSError, ValueError):  # ValueError: half a character can be in no file's name
        pass
    return [path.name]


def _learned(path: Path) -> list[str | int]:
    """Return the same of what else a model's directory gives a training: what makes its tokens, and its first weights,
    without the names; nothing for what is no directory."""
    weights = sorted(path.glob("*.safetensors"))[:1] if path.is_dir() else []
    return [part for file in (*map(path.joinpath, _TOKENIZER), *weights) for part in _content(file)[1:]]


@lru_cache(maxsize=64)  # a sweep asks once for each of its cells
def _ends(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as opened:
        head = opened.read(_END)
        opened.seek(max(0, size - _END))
        return hashlib.sha256(head + opened.read(_END)).hexdigest()


def fingerprint(spec: Experiment, gpu: str | None = None) -> str:
    """Return twelve hex digits of the SHA-256 of what changes the result: the spec and the name of the GPU."""
    return identities(spec, gpu)[0]


def family(spec: Experiment, gpu: str | None = None) -> str:
    """Return the fingerprint of what is left when the batch size and its accumulation are taken out: runs of one
    family differ in how much memory a step needs, and a larger batch needs more."""
    return identities(spec, gpu)[1]


def identities(spec: Experiment, gpu: str | None = None, known: dict[int, Any] | None = None) -> tuple[str, str]:
    """Return fingerprint and family. `known` keeps what is read of a section, by its id, while the section lives."""
    values = _relevant(spec, {} if known is None else known)
    whole = _digest([values, gpu])
    values["train"] = values.get("train", {}) | {"batch_size": None, "gradient_accumulation_steps": None}
    return whole, _digest([values, gpu])


def _digest(values: Any) -> str:
    return hashlib.sha256(_AS_TEXT(values).encode()).hexdigest()[:12]


def slug(spec: Experiment, gpu: str | None = None) -> str:
    """Return `qwen3-8b-qlora-b4-1f2e3d4c5b6a`: model, method, batch, fingerprint; before the batch the objective if it
    is not sft, and on several GPUs `fsdp-2gpus`: the strategy and their number; safe as a file name."""
    return named(spec, fingerprint(spec, gpu))


def named(spec: Experiment, fingerprint: str) -> str:
    """Return the slug with a fingerprint that is known already."""
    several = f"-{spec.launch.strategy}-{spec.launch.ranks}gpus" if spec.launch.ranks > 1 else ""
    objective = "" if spec.objective.name == "sft" else f"-{spec.objective.name}"
    trained = f"{model_slug(spec.model.id)}-{spec.method.name}{objective}"
    return f"{trained}{several}-b{spec.train.batch_size}-{fingerprint}"


def model_slug(model: str) -> str:
    """Return `qwen3-8b` for `Qwen/Qwen3-8B`."""
    return re.sub(r"[^a-z0-9.]+", "-", model.rsplit("/", 1)[-1].lower()).strip("-.")[:40] or "model"
