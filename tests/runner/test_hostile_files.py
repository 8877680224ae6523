"""Damaged files of every kind: a command reads them, or says one line and ends with status 2."""

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from segattn.tests.command import segattn
from segattn.tests.runner.model_files import write_gguf, write_hugging_face
from segattn.tests.runner.random_model import random_weights
from segattn.tests.runner.steps import DECODE, report_of, step

NUMBER_OF_EACH = 5
CONFIG = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 8,
    "block_size": 2,
    "num_blocks": 9,
}
VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    1 << 70,
    1e308,
    "x",
    "",
    [],
    {},
    [[]],
    {"a": {"b": []}},
)


def bits(content: bytes, rng: random.Random) -> bytes:
    """Some bits of the first bytes flipped, where the structure of a file is."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(min(len(changed), 2000))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(content: bytes, rng: random.Random) -> bytes:
    """A part of it."""
    return content[: rng.randrange(len(content))]


def nested(content: bytes, rng: random.Random) -> bytes:
    """Brackets without end."""
    return b"[" * 100_000 if rng.random() < 0.5 else b'{"a":' * 100_000


def swapped(content: bytes, rng: random.Random) -> bytes:
    """A value of JSON somewhere replaced by one of another type, or a key dropped or added."""
    if content[:2] == b"\x1f\x8b":
        return gzip.compress(swapped(gzip.decompress(content), rng))
    try:
        document = json.loads(content)
    except ValueError:
        return bits(content, rng)
    parent = document
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not keys:
            break
        key = rng.choice(keys)
        inner = parent[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            parent = inner
            continue
        if isinstance(parent, dict) and rng.random() < 0.2:
            parent["unknown" if rng.random() < 0.5 else key] = parent.pop(key)
        else:
            parent[key] = rng.choice(VALUES)
        break
    return json.dumps(document).encode()


MUTATIONS = (bits, truncated, nested, swapped)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    write_gguf(folder / "m.gguf", random_weights())
    write_hugging_face(folder / "hf", random_weights())
    (folder / "report.json").write_text(json.dumps(report_of([step(), DECODE])))
    arrival = {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 1}
    (folder / "w.jsonl").write_text(json.dumps(arrival) + "\n")
    rows = [{"label": "128/0, 2x128", "us": {"base": 1.0}, "model_flops": 1.0, "model_bytes": 1.0}]
    (folder / "kernels.json").write_text(json.dumps({"rows": rows, "steps": asdict(step())}))
    trace = {"id": "t", "kind": "base", "config": {}, "policy": {}, "events": [["pause", 0]]}
    finding = trace | {"scheduler": "segattn.scheduler:Scheduler", "judge": "invariants"}
    finding["config"] = CONFIG
    finding["events"] = [
        ["add", {"id": "a", "prompt": [5, 6], "max_tokens": 1}],
        ["schedule", 0],
        ["update", 0, [["a", [5]]]],
    ]
    (folder / "finding.jsonl.gz").write_bytes(gzip.compress(json.dumps(finding).encode()))
    (folder / "fuzz.json").write_text(json.dumps({"config": CONFIG, "policy": {}, "kind": "base"}))
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    return folder


CASES: dict[str, Callable[[Path], list[object]]] = {
    "m.gguf": lambda f: ["generate", "a", "--max-tokens", 1, "--model", f / "m.gguf"],
    "hf/config.json": lambda f: ["generate", "a", "--max-tokens", 1, "--model", f / "hf"],
    "hf/tokenizer.json": lambda f: ["generate", "a", "--max-tokens", 1, "--model", f / "hf"],
    "hf/tokenizer_config.json": lambda f: ["generate", "a", "--max-tokens", 1, "--model", f / "hf"],
    "hf/model-0.safetensors": lambda f: ["generate", "a", "--max-tokens", 1, "--model", f / "hf"],
    "report.json": lambda f: ["timeline", f / "report.json", "--html", f / "page.html"],
    "w.jsonl": lambda f: ["policies", "--workload", f / "w.jsonl"],
    "kernels.json": lambda f: ["bench", "plots", f / "kernels.json", "--folder", f / "plots"],
    "finding.jsonl.gz": lambda f: ["replay", f / "finding.jsonl.gz"],
    "fuzz.json": lambda f: [
        *("fuzz", "--minutes", 0, "--config", f / "fuzz.json", "--out", f / "failure.jsonl.gz")
    ],
    "t.jsonl.gz": lambda f: ["replay", f / "t.jsonl.gz"],
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_is_one_line(
    name: str, mutation: Callable[[bytes, random.Random], bytes], files: Path
) -> None:
    path = files / name
    good = path.read_bytes()
    limits = ["--max-model-len", 32, "--max-num-batched-tokens", 32]
    command = CASES[name](files)
    command += limits if command[0] == "generate" else []
    try:
        for seed in range(NUMBER_OF_EACH if mutation is not nested else 2):
            path.write_bytes(mutation(good, random.Random(seed)))
            result = segattn(*command)
            errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
            assert result.status in (0, 1, 2), seed
            assert "Traceback" not in result.err + result.out, seed
            assert "--debug" not in result.err, f"seed {seed} is an unforeseen error: {result.err}"
            assert len(errors) == (1 if result.status == 2 else len(errors)), seed
            # An error of the file is known before anything runs.
            assert result.status != 2 or result.out == "", seed
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", CASES)
def test_the_good_file_is_read(name: str, files: Path) -> None:
    command = CASES[name](files)
    limits = ["--max-model-len", 32, "--max-num-batched-tokens", 32]
    command += limits if command[0] == "generate" else []
    assert segattn(*command).status == 0
