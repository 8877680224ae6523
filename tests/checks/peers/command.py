"""Runs unmodified third-party NKI kernels on the interpreter, against their own references.

    python -m segattn.tests.checks.peers --nki-library PATH [--only NAME] [--list]
    python -m segattn.tests.checks.peers --nki-library PATH --tests FILE [--match TEXT]
    python -m segattn.tests.checks.peers --nki-samples PATH --neuron-sdk PATH

Each line is one case: kernel, case, largest difference from the reference relative to the largest
reference value, seconds. The exit status is 1 when a case fails. Needs torch, pytest and
allpairspy besides the package itself; PATH is a checkout, which is only read.
"""

import argparse
import ast
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from segattn.reference.nki.install import install
from segattn.tests.checks.peers.cases import KNOWN, PEERS, Peer
from segattn.tests.checks.peers.examples import Example, neuron_sdk_examples, nki_samples_examples
from segattn.tests.checks.peers.mlp import add_mlp_entry
from segattn.tests.checks.peers.modules import add_missing_modules, bridge_upstream_faults
from segattn.tests.checks.peers.results import Comparison, PeerResult

Report = Callable[[str, PeerResult], None]


def main(argv: list[str] | None = None) -> int:
    """Run the cases that the command line names and return the exit status."""
    args = _parser().parse_args(argv)
    if args.list:
        for peer in PEERS:
            print(f"{peer.name:24} {peer.path} {', '.join(peer.select)}")
        return 0
    table = _Table()
    if args.nki_library is not None:
        # First: the checkout has a package `test`, as the standard library has.
        root = args.nki_library.resolve()
        sys.path[:0] = [str(root), str(root / "src")]
    install()
    add_missing_modules()
    if args.nki_library is not None:
        add_mlp_entry(root)
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    if args.nki_library is not None:
        peers = [peer for peer in PEERS if args.only in (None, peer.name)]
        if args.tests:
            peers = [Peer(Path(args.tests).stem.removeprefix("test_"), args.tests, (args.match,))]
        _run_library(root, peers, table)
    if args.nki_samples is not None:
        _run_examples(nki_samples_examples(args.nki_samples.resolve()), args.only, table)
    if args.neuron_sdk is not None:
        _run_examples(neuron_sdk_examples(args.neuron_sdk.resolve()), args.only, table)
    return table.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="segattn.tests.checks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nki-library", type=Path, help="checkout of aws-neuron/nki-library")
    parser.add_argument("--nki-samples", type=Path, help="checkout of aws-neuron/nki-samples")
    parser.add_argument("--neuron-sdk", type=Path, help="checkout of aws-neuron/aws-neuron-sdk")
    parser.add_argument("--only", help="one kernel of --list")
    parser.add_argument("--tests", help="any test file of nki-library instead of the table")
    parser.add_argument("--match", default="", help="with --tests: part of the test's name")
    parser.add_argument("--list", action="store_true", help="print the table and stop")
    return parser


class _Table:
    """Prints results and counts them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.warned: Counter[str] = Counter()

    def add(self, kernel: str, result: PeerResult) -> None:
        """Print one line."""
        faulty = result.status == "failed" and result.case.startswith(KNOWN[""])
        self.counts["known fault" if faulty else result.status] += 1
        error = f"{result.comparison.error:.2e}" if result.status == "passed" else result.status
        notes = ["known" if faulty else "", result.reason]
        for rule, message in result.comparison.refused.items():
            known = result.case.startswith(KNOWN.get(rule, ()))
            notes.append(f"{'known' if known else 'refused by default'}: {message}")
            if not known:
                self.counts["refused by a rule"] += 1
        if result.comparison.warned:
            notes.append(f"warns: {', '.join(sorted(result.comparison.warned))}")
            self.warned.update(result.comparison.warned)
        line = f"{kernel:24} {result.case:72} {error:>9} {result.seconds:8.2f}s"
        print(f"{line}  {'; '.join(filter(None, notes))}".rstrip(), flush=True)

    def finish(self) -> int:
        """Print the totals and return the exit status."""
        if not self.counts:
            print("no case ran: give a checkout and see --list")
            return 1
        print(", ".join(f"{count} {status}" for status, count in sorted(self.counts.items())))
        if self.warned:
            print("cases that warn:", ", ".join(f"{n} {r}" for r, n in self.warned.most_common()))
        return 1 if self.counts["failed"] or self.counts["refused by a rule"] else 0


def _run_library(root: Path, peers: list[Peer], table: _Table) -> None:
    """Run the tests that `peers` select from a checkout of nki-library."""
    import pytest

    from segattn.tests.checks.peers.pytest_runs import PeerPlugin

    bridge_upstream_faults()
    for path, message in _unparsable(root / "src"):
        print(f"not Python, not run: {path.relative_to(root)}: {message}")
    for peer in peers:
        plugin = PeerPlugin(peer, partial(table.add, peer.name))
        options = ["--noconftest", "-p", "no:cacheprovider", "-p", "no:terminal"]
        options += ["--rootdir", str(root), "-c", str(root / "test" / "pytest.ini")]
        pytest.main([*options, str(root / peer.path)], plugins=[plugin])


def _unparsable(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*.py")):
        try:
            ast.parse(path.read_text())
        except SyntaxError as error:
            yield path, f"line {error.lineno}: {error.msg}"


def _run_examples(examples: list[Example], only: str | None, table: _Table) -> None:
    for example in examples:
        if only not in (None, example.kernel):
            continue
        comparison = Comparison()
        start = time.perf_counter()
        status, reason = "passed", ""
        try:
            example.run(comparison)
        except Exception as error:  # a fault of one example is a line of the table
            status, reason = "failed", f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        seconds = time.perf_counter() - start
        table.add(example.kernel, PeerResult(example.case, status, seconds, comparison, reason))
