"""`python -m segattn.benchmarks.coverage`."""

from segattn.benchmarks.coverage.command import main

if __name__ == "__main__":
    raise SystemExit(main())
