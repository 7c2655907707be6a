"""The GPU and its driver: seen, supported, whole, free, and at its own clocks and limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftbench.core import units
from ftbench.core.hardware import find_gpu
from ftbench.doctor.facts import Facts, cuda_version
from ftbench.doctor.findings import Finding, Verdict

AREA = "gpu"
FOREIGN_MEMORY_GB = 1.0
_SET_CLOCKS = 0x2  # nvml.h, nvmlClocksEventReasonApplicationsClocksSetting: clocks set by a user


def check(facts: Facts) -> list[Finding]:
    """The findings; a single `n/a` with the reason where there is no GPU."""
    if not facts.gpu and not facts.torch.get("devices"):
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        reason = (
            f"CUDA_VISIBLE_DEVICES={hidden!r} shows none" if hidden is not None
            else "the driver answers and shows none" if facts.driver
            else "no NVIDIA driver answers: where there is a GPU, install one, or start the container with --gpus all"
        )  # fmt: skip
        return [_finding("GPU", "n/a", f"none is used, and runs measure the CPU: {reason}")]
    if not facts.gpu:
        name = facts.torch["devices"][0]["name"]
        text = f"torch sees {name} and NVML does not: power, clocks, heat and device memory stay empty in every run"
        return [
            _finding("GPU", "warn", f"{text}; install the driver's libnvidia-ml"),
            *_kernels(facts),
            *_memory(facts),
        ]
    return [
        *_card(facts),
        *_driver(facts),
        *_kernels(facts),
        *_memory(facts),
        *_slice(facts),
        *_sharing(facts),
        *_errors(facts),
        *_power(facts),
        *_clocks(facts),
        *_persistence(facts),
    ]


def _finding(name: str, verdict: Verdict, text: str) -> Finding:
    return Finding(AREA, name, verdict, text)


def _card(facts: Facts) -> Iterator[Finding]:
    gpu, capability = facts.gpu, facts.capability
    size = f", {units.gibibytes(gpu['memory_gb'])} GiB" if gpu["memory_gb"] else ""
    title = f"{gpu['name']}{size}" + (f", compute capability {capability[0]}.{capability[1]}" if capability else "")
    if find_gpu(gpu["name"] or "") is None:
        yield _finding(
            "GPU", "warn",
            f"{title}; it is not in ftbench's table, so that MFU stays empty: `ftbench probe` measures its ceilings",
        )  # fmt: skip
    else:
        yield _finding("GPU", "ok", title)
    if (count := facts.driver.get("gpus") or 1) > 1:
        yield _finding(
            "GPUs", "ok", f"{count} in this machine; a run takes the first of CUDA_VISIBLE_DEVICES, `ftbench probe` "
            "tests whether they reach each other",
        )  # fmt: skip


def _driver(facts: Facts) -> Iterator[Finding]:
    """Any driver of the same major CUDA version runs what torch was built for (CUDA, minor version compatibility)."""
    have, built = cuda_version(facts.gpu["cuda"]), cuda_version(facts.torch.get("cuda"))
    title = f"{facts.gpu['driver'] or 'unknown version'}" + (f", up to CUDA {have[0]}.{have[1]}" if have else "")
    if have and built and have[0] < built[0]:
        yield _finding(
            "driver", "fail",
            f"{title}, and torch is built for CUDA {built[0]}.{built[1]}: update the driver, or install a torch for "
            f"CUDA {have[0]}",
        )  # fmt: skip
    else:
        yield _finding("driver", "ok", title)


def _kernels(facts: Facts) -> Iterator[Finding]:
    capability, built = facts.capability, facts.torch.get("arch_list") or []
    if capability is None or not built:
        yield _finding("kernels", "n/a", "what torch's kernels are compiled for is not known: see stack, torch build")
        return
    family = " (Blackwell)" if capability[0] in (10, 11, 12) else ""
    this = f"sm_{capability[0]}{capability[1]}{family}"
    if runs(capability, built) == "native":
        yield _finding("kernels", "ok", f"torch holds machine code for {this}")
    elif runs(capability, built) == "ptx":
        yield _finding(
            "kernels", "warn",
            f"torch holds no machine code for {this}; the driver compiles it at the start, and it may be slow: install "
            "a newer torch",
        )  # fmt: skip
    else:
        yield _finding(
            "kernels", "fail",
            f"torch holds kernels for {', '.join(built)} and none runs on {this}: install a newer torch, for CUDA 12.8 "
            "or later where the GPU is a Blackwell",
        )  # fmt: skip


def runs(capability: tuple[int, int], built: list[str]) -> str | None:
    """`native` where machine code of the same major version and no later minor one is there, `ptx` where only code is
    that the driver can compile, else None (CUDA C++ programming guide, binary and PTX compatibility). Code for a
    variant (`sm_90a`) runs on that compute capability alone."""
    native = ptx = False
    for text in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if not found:
            continue
        major, minor, variant = int(found[2]), int(found[3]), found[4]
        if found[1] == "sm":
            native |= major == capability[0] and (minor == capability[1] if variant == "a" else minor <= capability[1])
        else:
            ptx |= (major, minor) == capability if variant else (major, minor) <= capability
    return "native" if native else "ptx" if ptx else None


def _memory(facts: Facts) -> Iterator[Finding]:
    shared = any(device["integrated"] for device in facts.torch.get("devices", ()))
    if shared or "tegra" in facts.kernel or "GB10" in (facts.gpu.get("name") or ""):
        yield _finding(
            "memory", "warn",
            "GPU and host share their memory: a run that fills it takes it from the system, and the driver may not "
            "tell how much is used; judge by allocated memory, and leave some GiB to the host",
        )  # fmt: skip
    elif facts.gpu and facts.gpu["memory_gb"] is None:
        yield _finding(
            "memory", "n/a", "the driver does not tell how much there is: device memory stays empty in a run"
        )
    if facts.wsl:
        yield _finding(
            "WSL", "warn",
            "the Windows driver moves what does not fit into system memory, so that a run turns many times slower "
            "instead of running out: set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in NVIDIA's "
            "control panel",
        )  # fmt: skip


def _slice(facts: Facts) -> Iterator[Finding]:
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
    if facts.gpu["mig"] or "MIG" in (facts.gpu["name"] or ""):
        asked = "" if visible.startswith("MIG-") else " (choose one: CUDA_VISIBLE_DEVICES=MIG-…, from nvidia-smi -L)"
        yield _finding(
            "MIG", "warn",
            f"the GPU is cut into slices{asked}: figures are a slice's, so compare them with the same profile only",
        )  # fmt: skip
    else:
        yield _finding("MIG", "ok", "the whole GPU")


def _sharing(facts: Facts) -> Iterator[Finding]:
    others, used = facts.gpu["foreign_processes"], facts.gpu["memory_used_before_gb"]
    if others or (used is not None and used > FOREIGN_MEMORY_GB):
        yield _finding(
            "other processes", "warn",
            f"{others or 0} use the GPU, {units.gibibytes(used or 0)} GiB are taken: end them (nvidia-smi shows "
            "which), or figures are theirs too",
        )  # fmt: skip
    elif others is None and used is None:
        yield _finding("other processes", "n/a", "the driver does not tell; see that nothing else uses the GPU")
    else:
        yield _finding("other processes", "ok", "none")


def _errors(facts: Facts) -> Iterator[Finding]:
    count = facts.gpu["ecc_uncorrected"]
    if count is None:
        yield _finding("memory errors", "n/a", "this GPU does not count them, or ECC is off")
    elif count:
        yield _finding(
            "memory errors", "fail",
            f"{count} uncorrected since the driver was loaded: do not trust this GPU; reset it or have it looked at",
        )  # fmt: skip
    else:
        yield _finding("memory errors", "ok", "no uncorrected ones since the driver was loaded")


def _power(facts: Facts) -> Iterator[Finding]:
    limit, highest = facts.gpu["power_limit_w"], facts.gpu["power_limit_max_w"]
    if limit is None or highest is None:
        yield _finding("power limit", "n/a", "the driver does not tell it; look for throttle reasons in steps.csv")
    elif limit < highest - 1:
        yield _finding(
            "power limit", "warn",
            f"{limit:.0f} W of {highest:.0f} W: the GPU is slower than others of its kind; nvidia-smi -pl "
            f"{highest:.0f} raises it, or say so beside the figures",
        )  # fmt: skip
    else:
        yield _finding("power limit", "ok", f"{limit:.0f} W, the highest there is")


def _clocks(facts: Facts) -> Iterator[Finding]:
    chosen, default = (facts.driver.get(f"{name}_clock_mhz") for name in ("application", "default"))
    reasons = facts.driver.get("throttle")
    if chosen is not None and default is not None and chosen != default:
        yield _finding(
            "clocks", "warn", f"applications are held to {chosen} MHz instead of {default}: nvidia-smi -rac frees them"
        )
    elif reasons is not None and reasons & _SET_CLOCKS:
        yield _finding("clocks", "warn", "someone has set them: nvidia-smi -rgc and -rac free them")
    elif reasons is None:
        yield _finding("clocks", "n/a", "the driver does not tell what holds them; see throttle in steps.csv")
    else:
        yield _finding(
            "clocks", "ok", "nobody holds them now; a lock that shows under load only is in steps.csv, throttle"
        )


def _persistence(facts: Facts) -> Iterator[Finding]:
    mode = facts.driver.get("persistence")
    if mode is None:
        yield _finding("persistence", "n/a", "the driver does not tell whether it stays loaded between runs")
    elif mode:
        yield _finding("persistence", "ok", "the driver stays loaded between runs")
    else:
        yield _finding(
            "persistence", "warn",
            "the driver may unload between runs, so that each starts slower and settings are lost: nvidia-smi -pm 1",
        )  # fmt: skip
