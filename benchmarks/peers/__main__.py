"""`python -m segattn.benchmarks.peers`."""

from segattn.benchmarks.peers.command import main

if __name__ == "__main__":
    raise SystemExit(main())
