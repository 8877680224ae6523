"""`python -m segattn.tests.checks.calibration`."""

import sys

from segattn.tests.checks.calibration.command import main

sys.exit(main(sys.argv[1:]))
