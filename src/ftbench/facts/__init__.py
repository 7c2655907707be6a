"""Data files that ship with ftbench: GPUs, model shapes, the sample data set."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

SAMPLE = Path(__file__).parent / "sample.jsonl"  # the sample data set
# libyaml's loader takes a tenth of the time; a PyYAML that was built without it has none.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read_facts(name: str) -> Any:
    """Return what a YAML file of this folder holds; it is shared and not to be changed."""
    return yaml.load((Path(__file__).parent / name).read_text("utf-8"), Loader=_LOADER)
