"""The recipes that ship with ftbench (`recipes/*.yaml`): each states every optimization and the optimizer, so that it
is the same recipe wherever it is laid, and says nothing about model, data and batch."""

import os
from functools import cache
from pathlib import Path

from ftbench.errors import SpecError
from ftbench.spec.base import nearest, shortened, shown

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
SECTIONS = ("method", "train", "optimizations")


@cache
def recipes() -> dict[str, str]:
    """Name → what it is, the file's first line; the plain one first."""
    lines = {path.stem: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in FOLDER.glob("*.yaml")}
    return dict(sorted(lines.items(), key=lambda pair: (pair[0] != "plain", pair[0])))


def file_of(name: str, folder: Path) -> Path:
    """Return the file that `extends:` in `folder` means: one there, else a shipped one where it begins with
    `recipes/`. Raises SpecError with the shipped ones for a recipe that there is not."""
    beside = folder / name
    head, _, file = name.rpartition("/")
    if head != "recipes" or os.path.exists(beside):
        return beside
    if file.removesuffix(".yaml") not in recipes() or not file.endswith(".yaml"):
        files = [f"recipes/{known}.yaml" for known in recipes()]
        raise SpecError(
            f"extends: {shortened(name)}: no such file in {folder}, and no recipe of ftbench{nearest(name, files)} "
            f"(`ftbench list recipes`: {', '.join(files)})"
        )
    return FOLDER / file


def named(name: object, folder: Path) -> Path:
    """Return the file of `recipe: name`: a shipped one by its name, or a file in `folder`. Raises SpecError."""
    if not isinstance(name, str) or not name:
        raise SpecError(f"recipe: is the name of one recipe or a file, not {shown(name)} ({', '.join(recipes())})")
    if name in recipes():
        return FOLDER / f"{name}.yaml"
    path = file_of(name, folder)
    if not os.path.exists(path):
        raise SpecError(
            f"recipe: {shown(name)} is no recipe and no file{nearest(name, recipes())} "
            f"(allowed: {', '.join(recipes())}, or a YAML file with method, train and optimizations)"
        )
    return path
