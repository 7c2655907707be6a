"""The packages: there or not, inside of the bounds that were tried, built for this GPU."""

import re
import shutil

from ftbench.core.hardware import rocm_refusal
from ftbench.doctor.bounds import Requirement
from ftbench.doctor.facts import Facts, cuda_version
from ftbench.doctor.findings import Answer, Finding, answers

AREA = "stack"
XFORMERS_NEWEST = (9, 0)  # released builds up to 0.0.35, unslothai/unsloth#6828


def check(facts: Facts) -> list[Finding]:
    """Return a finding for ftbench and what it needs itself, one for each package that trains, and for what they are
    built for."""
    # What training needs first, then what is optional, each by name.
    extras = sorted((need for need in facts.requirements if need.extra), key=lambda n: (n.extra != "train", n.name))
    return [
        Finding(AREA, "ftbench", *_itself(facts)),
        *(Finding(AREA, need.name, *_package(facts, need)) for need in extras),
        *answers(AREA, CHECKS, facts),
    ]


def _itself(facts: Facts) -> Answer:
    about = facts.described["ftbench"]
    commit = f", commit {about['commit'][:12]}" if about["commit"] else ""
    title = f"{about['version']}{commit}, Python {facts.described['os']['python']}"
    if not facts.requirements:
        return "n/a", f"{title}; its bounds are not known here: pip install ftbench in this Python"
    versions = {need: facts.version(need.name) for need in facts.requirements if need.extra is None}
    outside = [f"{need.name} {version or 'missing'} ({need.bounds})" for need, version in versions.items()
               if not need.met_by(version or "0")]  # fmt: skip
    if outside:
        return "warn", f"{title}; outside of its bounds: {', '.join(outside)}: pip install -U ftbench"
    return "ok", title


def _package(facts: Facts, need: Requirement) -> Answer:
    version, install = facts.version(need.name), f"pip install 'ftbench[{need.extra}]'"
    if version is None and need.extra == "train":
        return "fail", f"not installed, and nothing is trained without it: {install}"
    if version is None:
        return "n/a", f"not installed; optional ({need.extra}): {install}"
    if not need.met_by(version):
        return "warn", f"{version} is outside of {need.bounds}, which is what was tried: {install}"
    return "ok", f"{version}, inside of {need.bounds}"


def _torch_build(facts: Facts) -> Answer:
    """Judge whether torch can use what the driver shows."""
    torch = facts.torch
    if not torch:
        return "n/a", f"{facts.why_no_torch}: pip install 'ftbench[train]', or mend that first"
    if torch["rocm"]:
        return "fail", rocm_refusal(torch["torch"])
    if torch["cuda"] is None and facts.gpu:
        return "fail", (
            f"{torch['torch']} is built for the CPU and this machine has {facts.gpu['name']}: install a build of "
            "torch for CUDA, or set CUDA_VISIBLE_DEVICES= (empty) to measure the CPU"
        )
    if torch["cuda"] is None:
        return "ok", f"{torch['torch']}, for the CPU"
    if torch["works"]:
        return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; a kernel ran on the GPU"
    if facts.gpu or torch["devices"]:
        return "fail", (
            f"{torch['torch']} cannot use the GPU ({torch['error'] or 'a wrong sum'}): install a build of torch for "
            "the driver's CUDA version and this compute capability"
        )
    return "ok", f"{torch['torch']}, CUDA {torch['cuda']}; no GPU is seen, so the CPU trains"


def bitsandbytes(facts: Facts) -> Answer | None:
    """Judge its kernels, one file a CUDA version. It takes that of torch's version, else an earlier, else a later one
    of the same major version, else none (bitsandbytes 0.50, cextension.get_cuda_bnb_library_path)."""
    wanted = cuda_version(facts.torch.get("cuda"))
    if not facts.has("bitsandbytes") or wanted is None or facts.capability is None:
        return None
    text = f"CUDA {wanted[0]}.{wanted[1]}"
    if override := facts.environment.get("BNB_CUDA_VERSION"):
        return "warn", f"BNB_CUDA_VERSION={override} is set and wins over torch's {text}: unset it"
    names = [re.fullmatch(r"libbitsandbytes_cuda(\d\d)(\d+)\.so", file) for file in facts.files("bitsandbytes")]
    built = sorted((int(name[1]), int(name[2])) for name in names if name)
    same = [version for version in built if version[0] == wanted[0]]
    if wanted in built:
        return "ok", f"holds kernels for torch's {text}"
    if same:
        taken = max((version for version in same if version < wanted), default=min(same))
        return "warn", (
            f"holds none for torch's {text} and takes those for {taken[0]}.{taken[1]}: pip install -U bitsandbytes if "
            "quantised layers fail"
        )
    listed = ", ".join(f"{major}.{minor}" for major, minor in built) or "no CUDA version"
    return "fail", (
        f"holds kernels for {listed}, torch has {text}: pip install -U bitsandbytes, or a torch for one of those"
    )


def _flash_attention(facts: Facts) -> Answer:
    if version := facts.version("flash-attn"):
        return "ok", version
    return "n/a", (
        "not installed; attention sdpa has a flash kernel of torch's own. For flash_attention_2: pip install "
        "flash-attn --no-build-isolation, which may compile for an hour, or pip install kernels"
    )


def _xformers(facts: Facts) -> Answer:
    version, gpu = facts.version("xformers"), facts.capability
    if version is None:
        return "n/a", "not installed; only unsloth would use it, and does without"
    if not gpu or gpu <= XFORMERS_NEWEST:
        return "ok", version
    return "warn", (
        f"{version}: released builds have kernels up to compute capability 9.0, this GPU has {gpu[0]}.{gpu[1]}: "
        "unsloth falls back to torch's attention, which takes more memory with packed data; build xformers for "
        f"this GPU (TORCH_CUDA_ARCH_LIST={gpu[0]}.{gpu[1]}), or remove it"
    )


def _triton(facts: Facts) -> Answer | None:
    if facts.capability is None:
        return None
    version = facts.version("triton")
    return ("ok", version) if version else (
        "n/a", "not installed; optimizations.compile needs it: pip install triton"
    )  # fmt: skip


def _compiler(facts: Facts) -> Answer:
    name = compiler(facts)
    return ("ok", name) if name else (
        "n/a", "none; optimizations.compile needs one: apt-get install g++, or set CC, CXX"
    )  # fmt: skip


def compiler(facts: Facts) -> str | None:
    """Return the name of the compiler that torch.compile would call: of C for triton's launchers, of C++ for a CPU."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if facts.capability else ("CXX", ("g++", "clang++", "c++"))
    chosen = facts.environment.get(variable)
    return next((name for name in ([chosen] if chosen else names) if shutil.which(name)), None)


CHECKS = {
    "torch build": _torch_build, "bitsandbytes build": bitsandbytes, "flash-attn": _flash_attention,
    "xformers": _xformers, "triton": _triton, "C compiler": _compiler,
}  # fmt: skip
