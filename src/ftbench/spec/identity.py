"""Which runs are the same experiment: a readable slug and a hash of what changes the result."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ftbench.spec.experiment import Experiment

_END = 1 << 20  # bytes of each end of a file that are hashed


def what_changes_the_result(spec: Experiment) -> dict[str, Any]:
    """The spec without its name, how it is launched, which steps are called warm-up, and where files lie: of a file its
    name and content count, so that the same spec on two machines is the same experiment and an edited file another."""
    values = spec.model_dump(mode="json", exclude={"name": True, "launch": True, "measure": {"warmup", "save_adapter"}})
    for part in ("model", "dataset"):
        if path := values[part].get("path"):
            values[part]["path"] = _content(Path(path))
    return values


def _content(path: Path) -> list[str | int]:
    """Name, size and a hash of both ends of a file; of a directory its name and its config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(_END)
            opened.seek(max(0, size - _END))
            return [path.name, size, hashlib.sha256(head + opened.read(_END)).hexdigest()]
    except OSError:
        return [path.name]


def fingerprint(spec: Experiment) -> str:
    """Eight hex digits of the SHA-256 of what changes the result."""
    text = json.dumps(what_changes_the_result(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def slug(spec: Experiment) -> str:
    """`qwen3-8b-qlora-b4-1f2e3d4c`: model, method, batch, fingerprint; safe as a file name."""
    model = re.sub(r"[^a-z0-9.]+", "-", spec.model.id.rsplit("/", 1)[-1].lower()).strip("-.")[:40] or "model"
    return f"{model}-{spec.method.name}-b{spec.train.batch_size}-{fingerprint(spec)}"
