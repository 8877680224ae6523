"""`python -m segattn.tests.checks.coverage`."""

from segattn.tests.checks.coverage.command import main

if __name__ == "__main__":
    raise SystemExit(main())
