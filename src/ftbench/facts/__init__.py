"""Data files of ftbench: GPUs, model shapes, the sample data set."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

SAMPLE = Path(__file__).parent / "sample.jsonl"  # the sample data set
# libyaml's loader takes a tenth of the time, but PyYAML may be built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read_facts(name: str) -> Any:
    """Return the content of a YAML file of this folder. It is cached and must not be changed."""
    return yaml.load((Path(__file__).parent / name).read_text("utf-8"), Loader=_LOADER)
