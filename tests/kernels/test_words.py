"""The prefill kernels are named in the field's words."""

import keyword
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kernels"
FILES = sorted((ROOT / "device/prefill").glob("*.py")) + [
    ROOT / "device" / name
    for name in (
        "loading.py", "masks.py", "padded_prefill_nki.py", "segmented_attention_nki.py",
        "softmax.py", "tile_schedule.py",
    )
] + [ROOT / "launch_prefill.py"]  # fmt: skip
OLD = {"share", "shares", "macro", "macros", "beside", "turn", "turns", "chain", "chains", "span"}
"""Words that this project once made up, for q_group, step, background, transpose and segment."""


def words_of(path: Path) -> set[str]:
    """The words that the identifiers of a file are made of, in lower case."""
    with path.open("rb") as file:
        names = [
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        ]
    spaced = [re.sub("([a-z])([A-Z])", r"\1_\2", name).lower() for name in names]
    return {word for name in spaced for word in name.split("_")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_identifier_has_an_old_word(path: Path) -> None:
    assert not words_of(path) & OLD
