"""`python -m segattn.tests.checks.second_opinion [TEXT [CORES]]`: both opinions on targets' rows.

TEXT selects rows as `segattn bench kernels --only` does; with 2 CORES, those of kernels that run on
both cores of a pair. 1 if one differs by more than the limit.
"""

import sys

from segattn.benchmarks.kernels.modelled import public_functions, record
from segattn.benchmarks.kernels.targets import TARGETS
from segattn.reference.nki.cost.result import evaluate
from segattn.tests.checks.second_opinion.evaluator import second_us

LIMIT = 0.06


def main(only: str, cores: int) -> int:
    """Print a line for each row."""
    worst = 0.0
    functions = public_functions()
    for work in (t.workload for t in TARGETS if only in f"{t.workload.kernel} {t.workload.label}"):
        if cores == 2 and work.kernel == "write_kv_cache":
            continue
        options = {"lnc": cores} if cores == 2 else {}
        launches = record(work, functions, **options)
        model = sum(evaluate(launch).modelled_us for launch in launches)
        second = sum(second_us(launch) for launch in launches)
        difference = second / model - 1
        worst = max(worst, abs(difference))
        mark = "" if abs(difference) <= LIMIT else "  DIFFERS"
        times = f"modelled {model:.1f} us, second {second:.1f} us, {difference:+.1%}"
        print(f"{work.label}: {times}{mark}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    text, cores, *_ = *sys.argv[1:], *("", "1")[len(sys.argv) - 1 :]
    sys.exit(main(text, int(cores)))
