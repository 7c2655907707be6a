"""The data files that ftbench ships: GPUs, shapes of public models, the sample data set."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SAMPLE = Path(__file__).parent / "sample.jsonl"  # the sample data set
# The loader of libyaml is ten times as fast, but PyYAML may be built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VARIANT = re.compile(r"-(?:Base|Instruct|Thinking)(?:-\d{4})?(?=-|$)")  # of the same shape: Qwen3-4B-Instruct-2507


@cache
def read_facts(name: str) -> Any:
    """Return the content of a YAML file in the folder `facts`. The content is cached, so callers must not change it."""
    return yaml.load((Path(__file__).parent / name).read_text("utf-8"), Loader=_LOADER)


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Return {model ID: Hugging Face configuration}, with all keys that a model with random weights needs."""
    table: dict[str, dict[str, Any]] = {}
    for file in ("architectures.yaml", "tiny.yaml"):
        for family, models in read_facts(file).items():
            for name, shape in models.items():
                config = {"model_type": family, **read_facts("families.yaml").get(family, {}), **shape}
                config.pop("parameters", None)
                table[name] = config
    return table


@cache
def architecture(name: str) -> dict[str, Any]:
    """Return the configuration of a model, or of a variant of the same shape by the same publisher. {} if unknown."""
    table, (base, is_variant) = architectures(), _VARIANT.subn("", name)
    similar = [each for each in table if is_variant and _VARIANT.sub("", each) == base]
    return table.get(name) or (table[similar[0]] if similar else {})
