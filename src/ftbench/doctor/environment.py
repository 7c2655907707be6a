"""The environment of another framework: whole, of the versions that were tried, and able to import its trainer."""

from collections.abc import Iterator

from ftbench.core import units
from ftbench.doctor.findings import Answer, Finding
from ftbench.launch.frameworks import Contents, contents, framework_of, interpreter_problem
from ftbench.spec.frameworks import FRAMEWORKS, Framework

AREA = "environment"
NEEDED = ((AREA, "trainer"), (AREA, "torch"))  # beside what a run is refused for anyway
_NAMED = 4  # packages of another version that are listed


def check(python: str, has_gpu: bool) -> list[Finding]:
    """Return the findings of an environment by its interpreter, whichever framework it has."""
    way = "`ftbench env create FRAMEWORK DIR` makes one"
    if problem := interpreter_problem(python):
        return [Finding(AREA, "interpreter", "fail", f"{python}: {problem}: {way}")]
    if (name := framework_of(python)) is None:
        return [Finding(AREA, "framework", "fail", f"{python} has none of {', '.join(FRAMEWORKS)}: {way}")]
    framework = FRAMEWORKS[name]
    return [*_of(framework, contents(python, framework), has_gpu)]


def _of(framework: Framework, inside: Contents, has_gpu: bool) -> Iterator[Finding]:
    version = inside.versions.get(framework.package)
    tried = version == framework.version
    way = "measure.allow_fallback=on runs it all the same"
    other = f"{version}, and {framework.version} is what was tried: {framework.way}; {way}"
    yield Finding(AREA, framework.package, "ok" if tried else "warn", f"{version}, as tried" if tried else other)
    yield Finding(AREA, "packages", *_packages(framework, inside))
    if inside.problem:
        yield Finding(AREA, "trainer", "fail", f"cannot be imported: {inside.problem}: {framework.way}")
    else:
        yield Finding(AREA, "trainer", "ok", "can be imported")
    if inside.torch is not None:
        yield Finding(AREA, "torch", *_torch(inside.torch, has_gpu))


def _packages(framework: Framework, inside: Contents) -> Answer:
    others = [
        f"{name} {inside.versions.get(name, 'missing')} ({version})" for name, version in framework.versions.items()
        if name != framework.package and inside.versions.get(name) != version
    ]  # fmt: skip
    if not others:
        return "ok", f"all {len(framework.versions)} are of the versions that were tried"
    return "warn", f"not as tried: {units.listed(others, _NAMED)}: what works beside them is not known"


def _torch(torch: dict[str, object], has_gpu: bool) -> Answer:
    if has_gpu and not torch["works"]:
        return "fail", f"{torch['version']} cannot use the GPU: install a build of torch for the driver's CUDA in it"
    return "ok", f"{torch['version']}{'' if has_gpu else ', and there is no GPU'}"
