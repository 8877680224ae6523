"""Output files: refused before the work, whole at any moment."""

import os
from pathlib import Path

import pytest

from segattn.reference.outputs import OutputFile, output_folder


def test_a_file_is_replaced_as_a_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    out = OutputFile(path)
    assert not path.exists()
    out.save_json({"rows": [1]})
    os.chmod(path, 0o640)
    out.save("second \udc80")
    assert path.read_text() == "second \\udc80"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["r.json"]


def test_the_old_content_survives_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    out = OutputFile(path)
    out.save("old")

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"r\.json': No space left on device"):
        out.save("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is a folder, must be a file"):
        OutputFile(tmp_path)
    with pytest.raises(OSError, match=r"absent/r': cannot be written: No such file"):
        OutputFile(tmp_path / "absent" / "r")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/sub': cannot be written"):
        output_folder(tmp_path / "file" / "sub")
    assert output_folder(tmp_path / "new" / "deep").is_dir()


def test_a_device_is_written_in_place() -> None:
    OutputFile(Path("/dev/null")).save("gone")
    assert not Path("/dev/null").is_file()
