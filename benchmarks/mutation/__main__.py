"""`python -m segattn.benchmarks.mutation`."""

import sys

from segattn.benchmarks.mutation.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
