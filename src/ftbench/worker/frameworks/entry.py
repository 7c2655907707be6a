"""Start the second part of a run with another framework: `PYTHON entry.py RUN_DIRECTORY`.

PYTHON is the framework's interpreter. ftbench is not installed there, so this file imports ftbench's source folder.
"""

import importlib.util
import sys
from pathlib import Path


def import_ftbench() -> None:
    """Make `ftbench` importable. Remove this folder from sys.path: its `axolotl.py` would hide the framework."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    package = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "ftbench", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ftbench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    import_ftbench()
    from ftbench.worker.__main__ import main
    from ftbench.worker.outcome import exit_now

    exit_now(main(sys.argv[1], handed_over=True))
