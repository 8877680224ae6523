"""`python -m segattn.reference.nki.lint FILE...`, the lint without the rest of the package."""

import argparse
import sys

from .command import add_arguments, run

parser = argparse.ArgumentParser(prog="segattn lint", description="Lint NKI kernels.")
add_arguments(parser)
parser.add_argument("--json", action="store_true", help="print JSON")
options = parser.parse_args()
try:
    status = run(options)
except (OSError, ValueError) as error:
    parser.error(str(error))
sys.exit(status)
