"""Which versions ftbench needs. pyproject.toml is the only place that says so: read from the installed package's
metadata, or from the file itself where ftbench runs from a checkout that was never installed."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging import requirements as pep508
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

_EXTRA = re.compile(r"extra == \"([\w-]+)\"")


class Requirement(pep508.Requirement):
    """A package with its bounds, and the extra that needs it; None for ftbench itself."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.name, extra = canonicalize_name(self.name), _EXTRA.search(str(self.marker or ""))
        self.extra = extra[1] if extra else None

    @property
    def bounds(self) -> str:
        """Return `>=2.8,<2.14`, the lower bound first."""
        return ",".join(sorted(map(str, self.specifier), key=lambda bound: (bound[0] != ">", bound)))

    def met_by(self, version: str) -> bool:
        """Return whether a version is inside of the bounds, by the rules of PEP 440; a text that is no version is
        outside."""
        try:
            return self.specifier.contains(version, prereleases=True)
        except InvalidVersion:
            return False


def requirements() -> list[Requirement]:
    """Return everything but the tools of development; nothing where neither source can be read."""
    try:
        texts = list(metadata.requires("ftbench") or ())
    except metadata.PackageNotFoundError:
        texts = _of_checkout()
    return [need for need in map(Requirement, texts) if need.extra != "dev"]


def _of_checkout() -> list[str]:
    try:
        project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    extras = project.get("optional-dependencies", {}).items()
    return [*project["dependencies"], *(f"{text}; extra == '{extra}'" for extra, texts in extras for text in texts)]
