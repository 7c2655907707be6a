"""Which versions ftbench asks for. pyproject.toml is the only place that says so: read from the installed package's
metadata, or from the file itself where ftbench runs from a checkout that was never installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([\w.+!*-]+)")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, its bounds as written (`>=2.8,<2.14`), and the extra that asks for it; None for ftbench itself."""

    name: str
    bounds: str
    extra: str | None


def requirements() -> list[Requirement]:
    """Everything but the tools of development; empty where neither source can be read."""
    return [requirement for requirement in _all() if requirement.extra != "dev"]


def _all() -> list[Requirement]:
    try:
        return [parse(text) for text in metadata.requires("ftbench") or ()]
    except metadata.PackageNotFoundError:
        return _of_checkout()


def _of_checkout() -> list[Requirement]:
    try:
        project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    extras = project.get("optional-dependencies", {}).items()
    return [
        *map(parse, project["dependencies"]),
        *(parse(f"{text}; extra == '{extra}'") for extra, texts in extras for text in texts),
    ]


def parse(text: str) -> Requirement:
    """`torch<2.14,>=2.8; extra == 'train'` in its parts, the lower bound first."""
    found = _REQUIREMENT.match(text)
    assert found, text
    extra = _EXTRA.search(found[3] or "")
    name = re.sub(r"[-_.]+", "-", found[1]).lower()  # as metadata spells it (PEP 503)
    return Requirement(name, ",".join(_ordered(found[2])), extra[1] if extra else None)


def _ordered(bounds: str) -> Iterable[str]:
    return sorted((part.strip() for part in bounds.split(",") if part.strip()), key=lambda part: part[0] != ">")


def within(version: str, bounds: str) -> bool:
    """Whether a version is inside of bounds. Only the numbers of its release count: `2.13.0+cpu` is 2.13.0."""
    have = _numbers(version)
    for operator, text in _BOUND.findall(bounds):
        width = max(len(have), len(_numbers(text)))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, _numbers(text)))
        holds = {
            ">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right,
            "==": left == right, "!=": left != right,
        }[operator]  # fmt: skip
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
