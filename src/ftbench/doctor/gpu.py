"""The GPU and its driver: seen, supported, whole, free, and at its own clocks and limits."""

import re

from ftbench.core import units
from ftbench.core.hardware import find_gpu
from ftbench.doctor.facts import Facts, cuda_version
from ftbench.doctor.findings import Answer, Finding, answers
from ftbench.store.run_warnings import FOREIGN_MEMORY_GB

AREA = "gpu"
_SET_CLOCKS = 0x2  # nvml.h, nvmlClocksEventReasonApplicationsClocksSetting: clocks set by a user


def check(facts: Facts) -> list[Finding]:
    """Return the findings; a single `n/a` with the reason where there is no GPU."""
    if facts.gpu:
        return answers(AREA, CHECKS, facts)
    if facts.torch.get("devices"):
        return answers(AREA, {"GPU": _unseen, "kernels": _kernels, "memory": _memory, "WSL": _wsl}, facts)
    return answers(AREA, {"GPU": _none}, facts)


def _none(facts: Facts) -> Answer:
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    reason = (
        f"CUDA_VISIBLE_DEVICES={hidden!r} shows none" if hidden is not None
        else "the driver answers and shows none" if facts.driver
        else "no NVIDIA driver answers: where there is a GPU, install one, or start the container with --gpus all"
    )  # fmt: skip
    return "n/a", f"none is used, and runs measure the CPU: {reason}"


def _unseen(facts: Facts) -> Answer:
    name = facts.torch["devices"][0]["name"]
    return "warn", (
        f"torch sees {name} and NVML does not: power, clocks, heat and device memory stay empty in every run; install "
        "the driver's libnvidia-ml"
    )


def _card(facts: Facts) -> Answer:
    gpu, capability = facts.gpu, facts.capability
    size = f", {units.gibibytes(gpu['memory_gb'])} GiB" if gpu["memory_gb"] else ""
    title = f"{gpu['name']}{size}" + (f", compute capability {capability[0]}.{capability[1]}" if capability else "")
    if find_gpu(gpu["name"] or "") is not None:
        return "ok", title
    return "warn", (
        f"{title}; it is not in ftbench's table, so that MFU stays empty: `ftbench probe` measures its ceilings"
    )


def _others(facts: Facts) -> Answer | None:
    if (count := facts.driver.get("gpus") or 1) == 1:
        return None
    return "ok", (
        f"{count} in this machine; a run takes the first of CUDA_VISIBLE_DEVICES, `ftbench probe` tests whether they "
        "reach each other"
    )


def _driver(facts: Facts) -> Answer:
    """Judge by the major version: any driver of the same major CUDA version runs what torch was built for (CUDA, minor
    version compatibility)."""
    have, built = cuda_version(facts.gpu["cuda"]), cuda_version(facts.torch.get("cuda"))
    title = f"{facts.gpu['driver'] or 'unknown version'}" + (f", up to CUDA {have[0]}.{have[1]}" if have else "")
    if not have or not built or have[0] >= built[0]:
        return "ok", title
    return "fail", (
        f"{title}, and torch is built for CUDA {built[0]}.{built[1]}: update the driver, or install a torch for CUDA "
        f"{have[0]}"
    )


def _kernels(facts: Facts) -> Answer:
    capability, built = facts.capability, facts.torch.get("arch_list") or []
    if capability is None or not built:
        return "n/a", "what torch's kernels are compiled for is not known: see stack, torch build"
    this = f"sm_{capability[0]}{capability[1]}" + (" (Blackwell)" if capability[0] in (10, 11, 12) else "")
    code = code_for(capability, built)
    if code == "native":
        return "ok", f"torch holds machine code for {this}"
    if code == "ptx":
        return "warn", (
            f"torch holds no machine code for {this}; the driver compiles it at the start, and it may be slow: install "
            "a newer torch"
        )
    return "fail", (
        f"torch holds kernels for {', '.join(built)} and none runs on {this}: install a newer torch, for CUDA 12.8 or "
        "later where the GPU is a Blackwell"
    )


def code_for(capability: tuple[int, int], built: list[str]) -> str | None:
    """Return `native` where machine code of the same major version and no later minor one is there, `ptx` where only
    code is that the driver can compile, else None (CUDA C++ programming guide, binary and PTX compatibility). Code for
    a variant (`sm_90a`) runs on that compute capability alone."""
    native = ptx = False
    for text in built:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if not parts:
            continue
        major, minor, variant = int(parts[2]), int(parts[3]), parts[4]
        if parts[1] == "sm":
            native |= major == capability[0] and (minor == capability[1] if variant == "a" else minor <= capability[1])
        else:
            ptx |= (major, minor) == capability if variant else (major, minor) <= capability
    return "native" if native else "ptx" if ptx else None


def _memory(facts: Facts) -> Answer | None:
    shared = any(device["integrated"] for device in facts.torch.get("devices", ()))
    if shared or "tegra" in facts.kernel or "GB10" in (facts.gpu.get("name") or ""):
        return "warn", (
            "GPU and host share their memory: a run that fills it takes it from the system, and the driver may not "
            "tell how much is used; judge by allocated memory, and leave some GiB to the host"
        )
    if facts.gpu and facts.gpu["memory_gb"] is None:
        return "n/a", "the driver does not tell how much there is: device memory stays empty in a run"
    return None


def _wsl(facts: Facts) -> Answer | None:
    if "microsoft" not in facts.kernel.lower():
        return None
    return "warn", (
        "the Windows driver moves what does not fit into system memory, so that a run turns many times slower instead "
        "of running out: set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in NVIDIA's control panel"
    )


def _slice(facts: Facts) -> Answer:
    if not facts.gpu["mig"] and "MIG" not in (facts.gpu["name"] or ""):
        return "ok", "the whole GPU"
    chosen = facts.environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    how = "" if chosen else " (choose one: CUDA_VISIBLE_DEVICES=MIG-…, from nvidia-smi -L)"
    return "warn", (
        f"the GPU is cut into slices{how}: figures are a slice's, so compare them with the same profile only"
    )


def _sharing(facts: Facts) -> Answer:
    others, used = facts.gpu["foreign_processes"], facts.gpu["memory_used_before_gb"]
    if others or (used is not None and used > FOREIGN_MEMORY_GB):
        return "warn", (
            f"{others or 0} use the GPU, {units.gibibytes(used or 0)} GiB are taken: end them (nvidia-smi shows "
            "which), or figures are theirs too"
        )
    if others is None and used is None:
        return "n/a", "the driver does not tell; see that nothing else uses the GPU"
    return "ok", "none"


def _errors(facts: Facts) -> Answer:
    count = facts.gpu["ecc_uncorrected"]
    if count is None:
        return "n/a", "this GPU does not count them, or ECC is off"
    if count == 0:
        return "ok", "no uncorrected ones since the driver was loaded"
    return "fail", (
        f"{count} uncorrected since the driver was loaded: do not trust this GPU; reset it or have it looked at"
    )


def _power(facts: Facts) -> Answer:
    limit, highest = facts.gpu["power_limit_w"], facts.gpu["power_limit_max_w"]
    if limit is None or highest is None:
        return "n/a", "the driver does not tell it; look for throttle reasons in steps.csv"
    if limit >= highest - 1:
        return "ok", f"{limit:.0f} W, the highest there is"
    return "warn", (
        f"{limit:.0f} W of {highest:.0f} W: the GPU is slower than others of its kind; nvidia-smi -pl {highest:.0f} "
        "raises it, or say so beside the figures"
    )


def _clocks(facts: Facts) -> Answer:
    chosen, default = (facts.driver.get(f"{name}_clock_mhz") for name in ("application", "default"))
    reasons = facts.driver.get("throttle")
    if chosen is not None and default is not None and chosen != default:
        return "warn", f"applications are held to {chosen} MHz instead of {default}: nvidia-smi -rac frees them"
    if reasons is None:
        return "n/a", "the driver does not tell what holds them; see throttle in steps.csv"
    if reasons & _SET_CLOCKS:
        return "warn", "someone has set them: nvidia-smi -rgc and -rac free them"
    return "ok", "nobody holds them now; a lock that shows under load only is in steps.csv, throttle"


def _persistence(facts: Facts) -> Answer:
    mode = facts.driver.get("persistence")
    if mode is None:
        return "n/a", "the driver does not tell whether it stays loaded between runs"
    if mode:
        return "ok", "the driver stays loaded between runs"
    return "warn", (
        "the driver may unload between runs, so that each starts slower and settings are lost: nvidia-smi -pm 1"
    )


CHECKS = {
    "GPU": _card, "GPUs": _others, "driver": _driver, "kernels": _kernels, "memory": _memory, "WSL": _wsl,
    "MIG": _slice, "other processes": _sharing, "memory errors": _errors, "power limit": _power, "clocks": _clocks,
    "persistence": _persistence,
}  # fmt: skip
