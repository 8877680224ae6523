"""Progress: a bar on a terminal, plain lines elsewhere; never on stdout."""

import io

import pytest

from segattn.runner.progress import phase


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_at_the_start_and_at_each_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with phase("working", 8) as advance:
        for _ in range(8):
            advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "working: 0/8",
        "working: 2/8",
        "working: 4/8",
        "working: 6/8",
        "working: 8/8",
    ]


def test_a_terminal_shows_a_bar_and_the_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with phase("working", 8) as advance:
        advance(3)
    assert "working" in terminal.getvalue()
    assert "3/8" in terminal.getvalue()
    assert "━" in terminal.getvalue()
    assert capsys.readouterr().out == ""
