"""`python -m tests.chaos`, or `make chaos`: the claim of exactly-once token streams, held against faults."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import structlog

from tests.chaos import company
from tests.chaos.reading import Violation
from tests.chaos.run import Plan, run_chaos, violations


def parse(arguments: list[str]) -> tuple[Plan, Path | None, str]:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    plan = Plan()
    parser.add_argument("--requests", type=int, default=plan.requests, help="how many are sent (%(default)s)")
    parser.add_argument("--seed", type=int, default=plan.seed, help="requests and faults are drawn from it")
    parser.add_argument("--duration", type=float, default=plan.duration_s, help="seconds of sending at most")
    parser.add_argument("--engines", type=int, default=plan.engines, help="processes that serve (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=plan.in_flight, help="requests at one time (%(default)s)")
    parser.add_argument(
        "--pause", type=float, nargs=2, default=plan.pause_s, metavar=("LEAST", "MOST"), help="seconds between faults"
    )
    parser.add_argument("--server", help="server program, e.g. /usr/bin/redis-server; default: Valkey")
    parser.add_argument("--fsync", choices=("always", "everysec"), default=plan.fsync, help="of the append-only file")
    parser.add_argument("--keep", type=Path, help="folder for the logs of server and engines, which then stay")
    parser.add_argument(
        "--deployment",
        choices=("single", "cluster", "sentinel"),
        default="single",
        help="servers in company: nodes are killed, slots move, masters fail over",
    )
    given = parser.parse_args(arguments)
    made = Plan(
        requests=given.requests,
        seed=given.seed,
        duration_s=given.duration,
        engines=given.engines,
        in_flight=given.in_flight,
        pause_s=tuple(given.pause),
        server=given.server,
        fsync=given.fsync,
    )
    return made, given.keep, given.deployment


def main(arguments: list[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    plan, keep, deployment = parse(arguments)
    if deployment != "single":
        with tempfile.TemporaryDirectory(prefix="pagemill-chaos-") as name:
            folder = Path(name) if keep is None else keep
            folder.mkdir(parents=True, exist_ok=True)
            return company.main(deployment, folder, requests=plan.requests, seed=plan.seed, duration_s=plan.duration_s)
    try:
        outcome = asyncio.run(run_chaos(plan, keep))
    except (Violation, BaseExceptionGroup) as error:
        found = violations(error)
        if not found:
            raise
        print(f"the claim does not hold: seed {plan.seed}, {plan.requests} requests")
        for violation in found:
            print(f"\n{violation}", *violation.events, sep="\n  ")
        return 1
    print(outcome.table())
    print(f"seed {plan.seed}, {outcome.seconds:.0f} s: the claim holds for {len(outcome.requests):,} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
