"""Which versions ftbench needs. pyproject.toml is the only place that says so: read from the installed package's
metadata, or from the file itself where ftbench runs from a checkout that was never installed."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging import requirements as pep508
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

_EXTRA = re.compile(r"extra == \"([\w-]+)\"")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, its bounds as written (`>=2.8,<2.14`), and the extra that needs it; None for ftbench itself."""

    name: str
    bounds: str
    extra: str | None


def requirements() -> list[Requirement]:
    """Return everything but the tools of development; nothing where neither source can be read."""
    try:
        texts = list(metadata.requires("ftbench") or ())
    except metadata.PackageNotFoundError:
        texts = _of_checkout()
    return [need for need in map(parse, texts) if need.extra != "dev"]


def _of_checkout() -> list[str]:
    try:
        project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    extras = project.get("optional-dependencies", {}).items()
    return [*project["dependencies"], *(f"{text}; extra == '{extra}'" for extra, texts in extras for text in texts)]


def parse(text: str) -> Requirement:
    """Return `torch<2.14,>=2.8; extra == 'train'` in its parts, the lower bound first."""
    need = pep508.Requirement(text)
    bounds = ",".join(sorted(map(str, need.specifier), key=lambda bound: (bound[0] != ">", bound)))
    extra = _EXTRA.search(str(need.marker or ""))
    return Requirement(canonicalize_name(need.name), bounds, extra[1] if extra else None)


def within(version: str, bounds: str) -> bool:
    """Return whether a version is inside of bounds, by the rules of PEP 440; a text that is no version is outside."""
    try:
        return SpecifierSet(bounds).contains(version, prereleases=True)
    except InvalidVersion:
        return False
