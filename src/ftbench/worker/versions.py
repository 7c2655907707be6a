"""Print torch's versions and GPUs as JSON for `ftbench doctor`: `python -m ftbench.worker.versions`.

torch, cuda        versions; cuda is null in a CPU or ROCm build
rocm               whether torch sees an AMD GPU
devices            visible GPUs: name, capability
works              whether a kernel ran on the first GPU; null without a GPU
error              the first line of the error if there is no GPU or the kernel failed
"""

import json
import warnings
from typing import Any

from ftbench.worker.outcome import exit_now


def main() -> int:
    """Print the versions as JSON."""
    warnings.simplefilter("ignore")
    print(json.dumps(versions()))
    return 0


def versions() -> dict[str, Any]:
    """Return torch's versions and GPUs."""
    import torch

    from ftbench.worker.device import sees_amd

    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": sees_amd(),
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
            result["devices"].append({"name": properties.name, "capability": [properties.major, properties.minor]})
        result["works"] = False
        result["works"] = float(torch.ones(2, device="cuda").sum()) == 2
    except Exception as error:  # noqa: BLE001 - the result reports it
        result["error"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return result


if __name__ == "__main__":
    exit_now(main())
