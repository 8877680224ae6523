"""`python -m segattn.benchmarks.scheduler`."""

from segattn.benchmarks.scheduler.command import main

if __name__ == "__main__":
    raise SystemExit(main())
