"""Check the GPU: is it known, free, and at its default clocks and limits?"""

from ftbench.core import units
from ftbench.core.hardware import find_gpu
from ftbench.doctor.facts import Answer, Facts, Finding
from ftbench.store.run_warnings import FOREIGN_MEMORY_GB

AREA = "gpu"
_USER_CLOCKS = 0x2  # nvml.h, nvmlClocksEventReasonApplicationsClocksSetting


def check(facts: Facts) -> list[Finding]:
    """Return findings; a single `n/a` with the reason if there is no GPU."""
    if facts.gpu:
        checks = CHECKS
    elif facts.torch.get("devices"):
        checks = {"GPU": _without_nvml, "memory": _memory, "WSL": _wsl}
    else:
        checks = {"GPU": _no_gpu}
    return [Finding(AREA, name, *answer) for name, function in checks.items() if (answer := function(facts))]


def _no_gpu(facts: Facts) -> Answer:
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    reason = (
        f"CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None
        else "no NVIDIA driver was found; install it, or start the container with --gpus all"
    )  # fmt: skip
    return "n/a", f"no GPU, runs measure the CPU: {reason}"


def _without_nvml(facts: Facts) -> Answer:
    name = facts.torch["devices"][0]["name"]
    return "warn", (
        f"torch sees {name}, but NVML does not: power, clocks, temperature and device memory stay empty in every run; "
        "install the driver's libnvidia-ml"
    )


def _card(facts: Facts) -> Answer:
    gpu, capability = facts.gpu, facts.capability
    size = f", {units.gibibytes(gpu['memory_gb'])} GiB" if gpu["memory_gb"] else ""
    title = f"{gpu['name']}{size}" + (f", compute capability {capability[0]}.{capability[1]}" if capability else "")
    if find_gpu(gpu["name"] or "") is not None:
        return "ok", title
    return "warn", f"{title}; it is not in ftbench's table, so MFU stays empty: measure its limits with `ftbench probe`"


def _memory(facts: Facts) -> Answer | None:
    shared = any(device["integrated"] for device in facts.torch.get("devices", ()))
    if shared or "tegra" in facts.kernel or "GB10" in (facts.gpu.get("name") or ""):
        return "warn", (
            "GPU and host share their memory: use the allocated memory for comparisons, and leave some GiB to the host"
        )
    if facts.gpu and facts.gpu["memory_gb"] is None:
        return "n/a", "the driver does not report its size: device memory stays empty in a run"
    return None


def _wsl(facts: Facts) -> Answer | None:
    if "microsoft" not in facts.kernel.lower():
        return None
    return "warn", (
        "the Windows driver moves what does not fit into system memory, and a run gets many times slower instead of "
        "running out: set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in NVIDIA's control panel"
    )


def _slice(facts: Facts) -> Answer | None:
    if not facts.gpu["mig"] and "MIG" not in (facts.gpu["name"] or ""):
        return None
    chosen = facts.environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    how = "" if chosen else " (choose one: CUDA_VISIBLE_DEVICES=MIG-…, from nvidia-smi -L)"
    return "warn", f"the GPU is split into MIG instances{how}: compare only with the same profile"


def _sharing(facts: Facts) -> Answer:
    others, used = facts.gpu["foreign_processes"], facts.gpu["memory_used_before_gb"]
    if others or (used is not None and used > FOREIGN_MEMORY_GB):
        return "warn", (
            f"{units.some(others or 0, 'process')} of others, {units.gibibytes(used or 0)} GiB in use: stop them "
            "(see nvidia-smi), otherwise measurements are not valid"
        )
    if others is None and used is None:
        return "n/a", "the driver does not report them; make sure that the GPU is free"
    return "ok", "none"


def _errors(facts: Facts) -> Answer:
    count = facts.gpu["ecc_uncorrected"]
    if count is None:
        return "n/a", "not counted: ECC is off or not supported"
    if count == 0:
        return "ok", "no uncorrected errors since the driver was loaded"
    return "fail", f"{count} uncorrected since the driver was loaded: do not trust this GPU; reset or replace it"


def _power(facts: Facts) -> Answer:
    limit, highest = facts.gpu["power_limit_w"], facts.gpu["power_limit_max_w"]
    if limit is None or highest is None:
        return "n/a", "the driver does not report it; see the throttle reasons in steps.csv"
    if limit >= highest - 1:
        return "ok", f"{limit:.0f} W, the maximum"
    return "warn", (
        f"{limit:.0f} W of {highest:.0f} W: the GPU is slower than others of its kind; raise it with nvidia-smi -pl "
        f"{highest:.0f}, or publish the limit with your results"
    )


def _clocks(facts: Facts) -> Answer:
    chosen, default = (facts.clocks.get(f"{name}_clock_mhz") for name in ("application", "default"))
    reasons = facts.clocks.get("throttle")
    if chosen is not None and default is not None and chosen != default:
        return "warn", f"limited to {chosen} MHz instead of {default}: reset with nvidia-smi -rac"
    if reasons is None:
        return "n/a", "the driver does not report limits; see the throttle reasons in steps.csv"
    if reasons & _USER_CLOCKS:
        return "warn", "locked by a user: reset with nvidia-smi -rgc and -rac"
    return "ok", "not locked"


CHECKS = {
    "GPU": _card, "memory": _memory, "WSL": _wsl, "MIG": _slice, "other processes": _sharing, "memory errors": _errors,
    "power limit": _power, "clocks": _clocks,
}  # fmt: skip
