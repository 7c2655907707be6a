"""What `-o` names: a file is replaced at once, a device or a pipe is written into, and neither is destroyed."""

import errno
import os
from pathlib import Path

from ftbench.core.redact import without_secrets
from ftbench.core.table import printable
from ftbench.errors import MissingError, SpecError
from ftbench.store.rundir import disk_error, write_text


def output_file(path: Path, stream: bool = True) -> Path:
    """Return the file that a path names, behind symbolic links. Raise SpecError for a directory, a link to itself, and
    a device or a pipe unless a `stream` can go there; MissingError where its folder is not there."""
    try:
        is_folder, is_special = path.is_dir(), path.exists() and not path.is_file()
        # The link /dev/stdout names a pipe by what is no path.
        target = Path(os.path.realpath(path)) if path.is_symlink() and not is_special else path
    except (OSError, ValueError) as error:
        raise SpecError(f"-o {str(path)!r}: cannot be written ({error})") from None
    if target.is_symlink() and not is_special:
        raise SpecError(f"-o {path}: is a link that leads back to itself; name a file")
    if is_folder:
        raise SpecError(f"-o {path}: is a directory; name a file")
    if is_special and not stream:
        raise SpecError(f"-o {path}: is a device or a pipe; name a file")
    if not target.parent.is_dir():
        raise MissingError(f"-o {path}: cannot be written: there is no folder {target.parent}; make it first")
    return target


def write_output(path: Path, text: str) -> None:
    """Write text without secrets and control characters to what `-o` names. Raise SpecError where it cannot be a file,
    MissingError where the disk does not take it."""
    target, text = output_file(path), printable(without_secrets(text))
    if not target.exists() or target.is_file():
        write_text(target, text)
        return
    try:
        # Who opens a pipe that nobody reads from waits for ever, unless it says that it will not.
        handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise MissingError(f"-o {path}: nobody reads from this pipe; start its reader first") from None
        raise disk_error(path, error) from None
