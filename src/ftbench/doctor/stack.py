"""The packages: there or not, inside of the bounds that were tried, built for this GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from ftbench.doctor.bounds import Requirement, within
from ftbench.doctor.facts import Facts, cuda_version
from ftbench.doctor.findings import Finding, Verdict

AREA = "stack"
XFORMERS_NEWEST = (9, 0)  # released builds up to 0.0.35, unslothai/unsloth#6828


def check(facts: Facts) -> list[Finding]:
    """One finding for ftbench and what it needs itself, one for each package that trains, and for what they are built
    for."""
    return [
        _itself(facts),
        *(_package(facts, need) for need in sorted(facts.requirements, key=_order) if need.extra),
        _torch_build(facts),
        *bitsandbytes(facts),
        *_kernels(facts),
        *_compilers(facts),
    ]


def _finding(name: str, verdict: Verdict, text: str) -> Finding:
    return Finding(AREA, name, verdict, text)


def _itself(facts: Facts) -> Finding:
    about = facts.described["ftbench"]
    commit = f", commit {about['commit'][:12]}" if about["commit"] else ""
    title = f"{about['version']}{commit}, Python {facts.described['os']['python']}"
    if not facts.requirements:
        return _finding("ftbench", "n/a", f"{title}; its bounds are not known here: pip install ftbench in this Python")
    own = [need for need in facts.requirements if need.extra is None]
    outside = [need for need in own if not within(facts.version(need.name) or "0", need.bounds)]
    if outside:
        listed = ", ".join(f"{need.name} {facts.version(need.name) or 'missing'} ({need.bounds})" for need in outside)
        return _finding("ftbench", "warn", f"{title}; outside of its bounds: {listed}: pip install -U ftbench")
    return _finding("ftbench", "ok", title)


def _order(need: Requirement) -> tuple[bool, str]:
    """What training needs first, then what is optional, each by name."""
    return need.extra != "train", need.name


def _package(facts: Facts, need: Requirement) -> Finding:
    have, install = facts.version(need.name), f"pip install 'ftbench[{need.extra}]'"
    if have is None and need.extra == "train":
        return _finding(need.name, "fail", f"not installed, and nothing is trained without it: {install}")
    if have is None:
        return _finding(need.name, "n/a", f"not installed; optional ({need.extra}): {install}")
    if not within(have, need.bounds):
        return _finding(need.name, "warn", f"{have} is outside of {need.bounds}, which is what was tried: {install}")
    return _finding(need.name, "ok", f"{have}, inside of {need.bounds}")


def _torch_build(facts: Facts) -> Finding:
    """Whether torch can use what the driver shows."""
    told = facts.torch
    if not told:
        return _finding("torch build", "n/a", f"{facts.why_no_torch}: pip install 'ftbench[train]', or mend that first")
    if told["cuda"] is None and facts.gpu:
        return _finding(
            "torch build", "fail",
            f"{told['torch']} is built for the CPU and this machine has {facts.gpu['name']}: install a build of "
            "torch for CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU",
        )  # fmt: skip
    if told["cuda"] is None:
        return _finding("torch build", "ok", f"{told['torch']}, for the CPU")
    if told["works"]:
        return _finding("torch build", "ok", f"{told['torch']}, CUDA {told['cuda']}; a kernel ran on the GPU")
    if facts.gpu or told["devices"]:
        return _finding(
            "torch build", "fail",
            f"{told['torch']} cannot use the GPU ({told['error'] or 'a wrong sum'}): install a build of torch for the "
            "driver's CUDA version and this compute capability",
        )  # fmt: skip
    return _finding("torch build", "ok", f"{told['torch']}, CUDA {told['cuda']}; no GPU is seen, so the CPU trains")


def bitsandbytes(facts: Facts) -> Iterator[Finding]:
    """Its kernels are one file a CUDA version. It takes that of torch's version, else an earlier, else a later one of
    the same major version, else none (bitsandbytes 0.50, cextension.get_cuda_bnb_library_path)."""
    wanted = cuda_version(facts.torch.get("cuda"))
    if not facts.has("bitsandbytes") or wanted is None or facts.capability is None:
        return
    name, text = "bitsandbytes build", f"CUDA {wanted[0]}.{wanted[1]}"
    if override := facts.environment.get("BNB_CUDA_VERSION"):
        yield _finding(name, "warn", f"BNB_CUDA_VERSION={override} is set and wins over torch's {text}: unset it")
        return
    found = [re.fullmatch(r"libbitsandbytes_cuda(\d\d)(\d+)\.so", file) for file in facts.files("bitsandbytes")]
    built = sorted((int(match[1]), int(match[2])) for match in found if match)
    same = [version for version in built if version[0] == wanted[0]]
    if wanted in built:
        yield _finding(name, "ok", f"holds kernels for torch's {text}")
    elif same:
        taken = max((version for version in same if version < wanted), default=min(same))
        yield _finding(
            name, "warn",
            f"holds none for torch's {text} and takes those for {taken[0]}.{taken[1]}: pip install -U bitsandbytes if "
            "quantised layers fail",
        )  # fmt: skip
    else:
        listed = ", ".join(f"{major}.{minor}" for major, minor in built) or "no CUDA version"
        yield _finding(
            name, "fail",
            f"holds kernels for {listed}, torch has {text}: pip install -U bitsandbytes, or a torch for one of those",
        )  # fmt: skip


def _kernels(facts: Facts) -> Iterator[Finding]:
    """Attention kernels that live in packages of their own."""
    flash, gpu = facts.version("flash-attn"), facts.capability
    if flash:
        yield _finding("flash-attn", "ok", flash)
    else:
        yield _finding(
            "flash-attn", "n/a",
            "not installed; attention sdpa has a flash kernel of torch's own. For flash_attention_2: pip install "
            "flash-attn --no-build-isolation, which may compile for an hour, or pip install kernels",
        )  # fmt: skip
    xformers = facts.version("xformers")
    if xformers is None:
        yield _finding("xformers", "n/a", "not installed; only unsloth would use it, and does without")
    elif gpu and gpu > XFORMERS_NEWEST:
        yield _finding(
            "xformers", "warn",
            f"{xformers}: released builds have kernels up to compute capability 9.0, this GPU has {gpu[0]}.{gpu[1]}: "
            "unsloth falls back to torch's attention, which takes more memory with packed data; build xformers for "
            f"this GPU (TORCH_CUDA_ARCH_LIST={gpu[0]}.{gpu[1]}), or remove it",
        )  # fmt: skip
    else:
        yield _finding("xformers", "ok", xformers)


def _compilers(facts: Facts) -> Iterator[Finding]:
    """What torch.compile turns graphs into code with."""
    if facts.capability is not None:
        triton = facts.version("triton")
        yield (
            _finding("triton", "ok", triton) if triton
            else _finding("triton", "n/a", "not installed; optimizations.compile needs it: pip install triton")
        )  # fmt: skip
    found = compiler(facts)
    yield (
        _finding("C compiler", "ok", found) if found
        else _finding("C compiler", "n/a", "none; optimizations.compile needs one: apt-get install g++, or set CC, CXX")
    )  # fmt: skip


def compiler(facts: Facts) -> str | None:
    """The name of the compiler that torch.compile would call: of C for triton's launchers, of C++ for a CPU."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if facts.capability else ("CXX", ("g++", "clang++", "c++"))
    asked = facts.environment.get(variable)
    return next((name for name in ([asked] if asked else names) if shutil.which(name)), None)
