"""The command line: `pagemill` and `python -m pagemill`."""

from __future__ import annotations

import sys

COMPUTE = frozenset(("serve", "engine", "bench"))  # commands that run an engine in their own process


def main() -> None:
    if not COMPUTE.isdisjoint(sys.argv[1:]):  # wherever options stand; for others that say such a word it does no harm
        from pagemill.engine.interpreter_memory import gather

        gather()  # first of all, since it is about what is allocated from now on
    from pagemill.adapters.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
