"""`python -m segattn.tests.checks.second_opinion [TEXT]`: both opinions on each target's row.

TEXT selects rows as `segattn bench kernels --only` does. 1 if one differs by more than the limit.
"""

import sys

from segattn.benchmarks.kernels.modelled import public_functions, record
from segattn.benchmarks.kernels.targets import TARGETS
from segattn.reference.nki.cost.result import evaluate
from segattn.tests.checks.second_opinion.evaluator import Evaluator

LIMIT = 0.06


def main(only: str) -> int:
    """Print a line for each row."""
    worst = 0.0
    functions = public_functions()
    for work in (t.workload for t in TARGETS if only in f"{t.workload.kernel} {t.workload.label}"):
        launches = record(work, functions)
        model = sum(evaluate(launch).modelled_us for launch in launches)
        second = sum(Evaluator(launch).run() for launch in launches)
        difference = second / model - 1
        worst = max(worst, abs(difference))
        mark = "" if abs(difference) <= LIMIT else "  DIFFERS"
        times = f"modelled {model:.1f} us, second {second:.1f} us, {difference:+.1%}"
        print(f"{work.label}: {times}{mark}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
