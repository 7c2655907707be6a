"""What only torch can tell, as one JSON object on stdout: `python -m ftbench.worker.versions`. Asked by the doctor.

torch, cuda        versions; cuda is null in a build for the CPU or for AMD's GPUs
rocm               whether it sees a GPU of AMD's
arch_list          what its kernels are compiled for: sm_90, sm_120, compute_120 …
devices            the GPUs it sees: name, capability, integrated (memory shared with the host)
works              whether a kernel ran on the first of them; null without one
error              the first line of what went wrong, where it sees none or a kernel did not run
"""

import json
import warnings
from typing import Any

from ftbench.worker.child import end


def main() -> int:
    """Print what torch says of itself."""
    warnings.simplefilter("ignore")
    print(json.dumps(versions()))
    return 0


def versions() -> dict[str, Any]:
    """Return the versions, and what torch says of the GPU."""
    import torch

    from ftbench.worker.device import sees_amd

    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": sees_amd(),
        "arch_list": torch.cuda.get_arch_list(),
        "devices": [],
        "works": None,
        "error": None,
    }
    if torch.version.cuda is None:
        return result
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            result["devices"].append({
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "integrated": bool(getattr(properties, "is_integrated", False)),
            })  # fmt: skip
        result["works"] = False
        result["works"] = float(torch.ones(2, device="cuda").sum()) == 2
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the answer
        result["error"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return result


if __name__ == "__main__":
    end(main())
