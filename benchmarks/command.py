"""`segattn bench NAME ...`: the benchmarks, each imported only when it is called."""

from collections.abc import Sequence

from segattn.runner.cli import NOTHING_DONE, Command, failure, load

BENCHMARKS = {
    "kernels": Command(
        "benchmarks.kernels.command:main",
        "attention kernels: modelled, or measured with --backend device",
    ),
    "attention_cte": Command(
        "benchmarks.kernels.attention_cte:main",
        "AWS's public prefill kernel beside ours, both modelled",
    ),
    "footprint": Command(
        "benchmarks.kernels.footprint:main", "SBUF bytes and program length over supported shapes"
    ),
    "microbenchmarks": Command(
        "benchmarks.microbenchmarks.command:main", "open constants of the cost model, on a device"
    ),
    "plots": Command(
        "benchmarks.kernels.plots:main", "roofline, time against prior, engine timeline as pictures"
    ),
    "policies": Command(
        "benchmarks.scheduler.policies:main",
        "Neuron scheduling policies on a virtual clock, modelled times",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; its exit status, or 2 for an unknown name."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: segattn bench NAME ...\n")
        print("\n".join(f"  {name:<16} {entry.help}" for name, entry in BENCHMARKS.items()))
        return 0 if argv else NOTHING_DONE
    name, *rest = argv
    if name not in BENCHMARKS:
        return failure(f"no benchmark {name!r}: must be one of {', '.join(BENCHMARKS)}")
    return load(BENCHMARKS[name])(rest)
