"""Files that commands write: opened before the work, never half written."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


class OutputFile:
    """A file that is written beside its place and then renamed, as often as there is news.

    At any moment the file is what was there before or a whole text: an interrupt, a crash or a full
    disk loses at most the newest rows.
    """

    def __init__(self, path: Path) -> None:
        """OSError now, and not after the work, for a path that cannot be written."""
        self.path = path
        if path.is_dir():
            raise IsADirectoryError(f"output {str(path)!r}: is a folder, must be a file")
        if path.exists() and not path.is_file():
            return  # a device or a pipe: nothing can be put beside it
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise OSError(f"output {str(path)!r}: cannot be written: {error.strerror}") from error

    def save(self, content: str | bytes) -> None:
        """Replace the file. OSError naming it, with the old content kept, when that fails."""
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_bytes(data)
                return
            handle, beside = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.chmod(beside, self._mode())
                os.replace(beside, self.path)
            except BaseException:
                os.unlink(beside)
                raise
        except OSError as error:
            raise OSError(f"output {str(self.path)!r}: {error.strerror or error}") from error

    def save_json(self, value: Any) -> None:
        """Replace the file by `value` as JSON."""
        self.save(json.dumps(value, indent=1))

    def _mode(self) -> int:
        """Permissions of the old file, or those of a new one."""
        if self.path.exists():
            return self.path.stat().st_mode & 0o777
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def output_folder(path: Path) -> Path:
    """A folder to write into, made now. OSError naming it when that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(
            f"output folder {str(path)!r}: cannot be written: {error.strerror}"
        ) from error
    return path
