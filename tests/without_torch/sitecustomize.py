"""On PYTHONPATH this makes the training libraries absent, for this process and its children: `scripts/test --light`."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

ABSENT = {"accelerate", "bitsandbytes", "datasets", "peft", "torch", "transformers", "trl"}


class Finder(PathFinder):
    """Find all modules except these, as on a machine without them."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
