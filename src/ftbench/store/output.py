"""Write the file that the user gives with `-o`."""

import os
from pathlib import Path

from ftbench.core.redact import without_secrets
from ftbench.core.table import printable
from ftbench.errors import MissingError, SpecError
from ftbench.store.rundir import write_text


def output_file(path: Path) -> Path:
    """Return the path that the user gave with `-o`, with symbolic links resolved.

    Raises:
        SpecError: The path is a folder, a device or a pipe.
        MissingError: The folder of the file does not exist.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink() or (os.path.exists(target) and not target.is_file()):  # a link to itself stays a link
        raise SpecError(f"-o {path}: is not a regular file; name a file")
    if not target.parent.is_dir():
        raise MissingError(f"-o {path}: cannot be written: the folder {target.parent} does not exist; create it first")
    return target


def write_output(path: Path, text: str) -> None:
    """Remove secrets and control characters from a text and write the text to the file of `-o`."""
    write_text(output_file(path), printable(without_secrets(text)))
