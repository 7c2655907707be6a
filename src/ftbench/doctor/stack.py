"""Check the installed packages, the build of torch, and the environments of other frameworks."""

import re
from collections.abc import Iterator

from ftbench.core import units
from ftbench.core.hardware import rocm_refusal
from ftbench.doctor.facts import Answer, Facts, Finding, Requirement, cuda_version
from ftbench.launch.frameworks import Contents, contents, framework_of, is_interpreter
from ftbench.spec.frameworks import FRAMEWORKS, Framework

AREA, ENVIRONMENT = "stack", "environment"
NEEDED = ((ENVIRONMENT, "trainer"), (ENVIRONMENT, "torch"))  # findings that prevent a run of another framework
_LISTED = 4  # packages of another version


def check(facts: Facts) -> list[Finding]:
    """Return findings for ftbench, its extras (training first), and the builds of torch and bitsandbytes."""
    extras = sorted((need for need in facts.requirements if need.extra), key=lambda n: (n.extra != "train", n.name))
    findings = [
        Finding(AREA, "ftbench", *_ftbench(facts)),
        *(Finding(AREA, need.name, *_package(facts, need)) for need in extras),
        Finding(AREA, "torch build", *_torch_build(facts)),
    ]
    if answer := bitsandbytes(facts):
        findings.append(Finding(AREA, "bitsandbytes build", *answer))
    return findings


def _ftbench(facts: Facts) -> Answer:
    about = facts.described["ftbench"]
    commit = f", commit {about['commit'][:12]}" if about["commit"] else ""
    title = f"{about['version']}{commit}, Python {facts.described['os']['python']}"
    if not facts.requirements:
        return "n/a", f"{title}; versions are not checked because ftbench is not installed: pip install ftbench"
    versions = {need: facts.version(need.name) for need in facts.requirements if need.extra is None}
    outside = [f"{need.name} {version or 'missing'} ({need.bounds})" for need, version in versions.items()
               if not need.met_by(version or "0")]  # fmt: skip
    if outside:
        return "warn", f"{title}; unsupported versions: {', '.join(outside)}: pip install -U ftbench"
    return "ok", title


def _package(facts: Facts, need: Requirement) -> Answer:
    version, install = facts.version(need.name), f"pip install 'ftbench[{need.extra}]'"
    if version is None and need.extra == "train":
        return "fail", f"not installed, but training needs it: {install}"
    if version is None:
        return "n/a", f"not installed; optional ({need.extra}): {install}"
    if not need.met_by(version):
        return "warn", f"{version} is outside of the tested versions {need.bounds}: {install}"
    return "ok", f"{version}, within {need.bounds}"


def _torch_build(facts: Facts) -> Answer:
    torch = facts.torch
    if not torch:
        return "n/a", f"{facts.why_no_torch}: pip install 'ftbench[train]'"
    if torch["rocm"]:
        return "fail", rocm_refusal(torch["torch"])
    if torch["cuda"] is None and facts.gpu:
        return "fail", (
            f"{torch['torch']} is built for the CPU, but this machine has {facts.gpu['name']}: install a build "
            "of torch for CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )
    if torch["cuda"] is None:
        return "ok", f"{torch['torch']}, for the CPU"
    if torch["works"]:
        return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; a test kernel ran on the GPU"
    if facts.gpu or torch["devices"]:
        driver = cuda_version(facts.gpu.get("cuda"))
        supported = f", and the driver supports CUDA {driver[0]}.{driver[1]}" if driver else ""
        return "fail", (
            f"{torch['torch']} cannot use the GPU ({torch['error'] or 'wrong result'}); it is built for CUDA "
            f"{torch['cuda']}{supported}: update the driver, or install a build of torch for this driver and GPU"
        )
    return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; there is no GPU, runs use the CPU"


def bitsandbytes(facts: Facts) -> Answer | None:
    """Check that bitsandbytes has kernels for torch's CUDA version.

    It ships one file per CUDA version. It loads the exact version, otherwise another one of the same major version
    (bitsandbytes 0.50, cextension.get_cuda_bnb_library_path).
    """
    wanted = cuda_version(facts.torch.get("cuda"))
    if not facts.has("bitsandbytes") or wanted is None or facts.capability is None:
        return None
    text = f"CUDA {wanted[0]}.{wanted[1]}"
    if override := facts.environment.get("BNB_CUDA_VERSION"):
        return "warn", f"BNB_CUDA_VERSION={override} overrides torch's {text}: unset it"
    names = [re.fullmatch(r"libbitsandbytes_cuda(\d\d)(\d+)\.so", file) for file in facts.files("bitsandbytes")]
    built = sorted((int(name[1]), int(name[2])) for name in names if name)
    if wanted in built:
        return "ok", f"has kernels for torch's {text}"
    if any(major == wanted[0] for major, _ in built):
        return "warn", (
            f"has no kernels for torch's {text} and uses those of another minor version: pip install -U bitsandbytes "
            "if quantized layers fail"
        )
    versions = ", ".join(f"{major}.{minor}" for major, minor in built) or "no CUDA version"
    return "fail", (
        f"has kernels for {versions}, but torch uses {text}: pip install -U bitsandbytes, or install another torch"
    )


def check_environment(python: str, has_gpu: bool) -> list[Finding]:
    """Return findings for the environment of another framework, given its Python interpreter."""
    create = "docs/how-to/other-frameworks.md says how to install one"
    if not is_interpreter(python):
        return [Finding(ENVIRONMENT, "interpreter", "fail", f"{python}: no such interpreter: {create}")]
    if (name := framework_of(python)) is None:
        return [Finding(ENVIRONMENT, "framework", "fail", f"{python} has none of {', '.join(FRAMEWORKS)}: {create}")]
    framework = FRAMEWORKS[name]
    return [*_environment(framework, contents(python, framework), has_gpu)]


def _environment(framework: Framework, inside: Contents, has_gpu: bool) -> Iterator[Finding]:
    version = inside.versions.get(framework.package)
    tested = version == framework.version
    text = f"{version}, as tested" if tested else (
        f"{version}, but {framework.version} was tested: {framework.way}; or set measure.allow_fallback=on"
    )  # fmt: skip
    yield Finding(ENVIRONMENT, framework.package, "ok" if tested else "warn", text)
    yield Finding(ENVIRONMENT, "packages", *_packages(framework, inside))
    if inside.problem:
        yield Finding(ENVIRONMENT, "trainer", "fail", f"cannot be imported: {inside.problem}: {framework.way}")
    else:
        yield Finding(ENVIRONMENT, "trainer", "ok", "can be imported")
    if torch := inside.torch:
        works = torch["works"] or not has_gpu
        fix = "cannot use the GPU: install a build of torch for the driver's CUDA version"
        yield Finding(ENVIRONMENT, "torch", *(("ok", f"{torch['version']}") if works else
                                              ("fail", f"{torch['version']} {fix}")))  # fmt: skip


def _packages(framework: Framework, inside: Contents) -> Answer:
    others = [
        f"{name} {inside.versions.get(name, 'missing')} ({version})" for name, version in framework.versions.items()
        if name != framework.package and inside.versions.get(name) != version
    ]  # fmt: skip
    if not others:
        return "ok", f"all {len(framework.versions)} have the tested versions"
    return "warn", f"not the tested versions: {units.listed(others, _LISTED)}"
