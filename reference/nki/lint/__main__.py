"""`python -m segattn.reference.nki.lint FILE...`."""

import sys

from .command import main

sys.exit(main())
