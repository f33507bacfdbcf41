"""The command line: `pagemill` and `python -m pagemill`."""

from __future__ import annotations

import sys


def main() -> None:
    from pagemill.adapters.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
