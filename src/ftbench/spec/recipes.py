"""The shipped recipes (`recipes/*.yaml`).

Each one sets every optimization and the optimizer, so that it does not depend on the spec it is added to. It does not
set model, dataset or batch size.
"""

import os
from functools import cache
from pathlib import Path

from ftbench.errors import SpecError
from ftbench.spec.base import nearest, shown

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
SECTIONS = ("method", "train", "optimizations")


@cache
def recipes() -> dict[str, str]:
    """Return the name and first comment line of each shipped recipe, the plain one first."""
    lines = {path.stem: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in FOLDER.glob("*.yaml")}
    return dict(sorted(lines.items(), key=lambda pair: (pair[0] != "plain", pair[0])))


def named(name: object, folder: Path) -> Path:
    """Return the file of `recipe: name`: a shipped recipe, or a file in `folder`."""
    if not isinstance(name, str) or not name:
        raise SpecError(f"recipe: must be the name of a recipe or a file, not {shown(name)} ({', '.join(recipes())})")
    if name in recipes():
        return FOLDER / f"{name}.yaml"
    path = folder / name
    if not os.path.exists(path):
        raise SpecError(
            f"recipe: {shown(name)} is neither a recipe nor a file{nearest(name, recipes())} "
            f"(allowed: {', '.join(recipes())}, or a YAML file with method, train and optimizations)"
        )
    return path
