"""`python -m segattn.tests.checks.peers`."""

from segattn.tests.checks.peers.command import main

if __name__ == "__main__":
    raise SystemExit(main())
