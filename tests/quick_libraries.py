"""Shortcuts for processes that train many times: work that libraries repeat in each training and that no test needs."""

import uuid
from functools import cache


def quicken() -> None:
    """Look up packages once. Leave out the text of each configuration for the log, and the hashes of data sets."""
    from accelerate.utils import imports
    from datasets import arrow_dataset
    from transformers import PreTrainedConfig

    imports._is_package_available = cache(imports._is_package_available)
    arrow_dataset.generate_fingerprint = lambda *_, **__: uuid.uuid4().hex[:16]
    PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]
