"""`python -m segattn.tests.checks.peers`."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it: tiles are small for BLAS

from segattn.tests.checks.peers.command import main

if __name__ == "__main__":
    raise SystemExit(main())
