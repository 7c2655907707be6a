"""Fixtures for several files of this folder."""

from __future__ import annotations

import pytest

from ftbench.estimate.recommend import candidates
from ftbench.spec.load import shipped_recipes


@pytest.fixture
def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three recipes and no combinations: enough for tests that do not depend on the training variants."""
    few = {name: shipped_recipes()[name] for name in ("fastest", "small", "smallest")}
    monkeypatch.setattr(candidates, "_combined", lambda *_: ())
    monkeypatch.setattr(candidates, "shipped_recipes", lambda: few)
