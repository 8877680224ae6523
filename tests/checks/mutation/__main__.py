"""`python -m segattn.tests.checks.mutation`."""

import sys

from segattn.tests.checks.mutation.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
