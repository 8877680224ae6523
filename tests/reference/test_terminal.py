"""What reaches a terminal: escaped text, tables that fit, progress on stderr alone."""

import io

import pytest

from segattn.reference.terminal import columns, one_line, phase, printable, table


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


def test_a_phase_of_nothing_ends() -> None:
    with phase("nothing", 0) as advance:
        advance(0)


def test_a_terminal_shows_a_bar_that_is_wiped_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with phase("working", 8) as advance:
        advance(2)
    shown = terminal.getvalue()
    assert f"working [{'#' * 6}{' ' * 18}] 2/8" in shown
    assert shown.endswith("\r\x1b[K")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 日本", "plain é 日本"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb", "a\\u202eb"),  # turns the direction of what follows
        ("\udc80", "\\udc80"),
        ("a\nb\tc", "a\\nb\\tc"),
    ],
)
def test_nothing_that_steers_a_terminal_reaches_it(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_line_breaks_can_be_kept() -> None:
    assert printable("a\nb\x1b", "\n") == "a\nb\\x1b"
    assert one_line(" a\n b\r\n") == "a b"


def test_a_table_fits_80_columns_and_shows_all_with_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heads = columns("name", ">us", "why", "+>more")
    rows = [("a", 1.5, "word " * 40, 7), ("bb", 20, "x", 8)]
    narrow = table("Title", heads, rows)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.count("word") == 40
    assert "more" not in narrow
    wide = table("Title", heads, rows, wide=True).splitlines()
    assert wide[1].split() == ["name", "us", "why", "more"]
    assert wide[3].split()[0:2] == ["a", "1.5"]
    assert wide[4].endswith(" 8")
    assert len(wide) == 5


def test_a_table_of_no_rows_has_its_heading() -> None:
    assert table("T", columns("a", ">b"), []).splitlines() == ["T", "a  b", "-  -"]
