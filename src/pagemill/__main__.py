"""The command line: `pagemill` and `python -m pagemill`."""

from __future__ import annotations

import sys

COMPUTE = ("serve", "engine", "bench")  # commands that run an engine in their own process


def main() -> None:
    if any(argument in COMPUTE for argument in sys.argv[1:2]):
        from pagemill.engine.interpreter_memory import gather

        gather()  # first of all, since it is about what is allocated from now on
    from pagemill.adapters.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
