"""`pagemill bench simulate`: a recorded trace through the engine's own scheduler, on a modelled device."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings, nearest
from pagemill.adapters.cli.simulate_flags import (
    ADMISSIONS,
    FORECASTS,
    POLICIES,
    PREEMPTION_MODES,
    SWEEPS,
    TENANTS,
    TIMINGS,
)
from pagemill.adapters.cli.simulate_overload import run_overload
from pagemill.adapters.cli.simulate_tables import OVERLOAD_COLUMNS, SWEEP_COLUMNS, Case, print_cases
from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals, Mode
from pagemill.engine.simulator.baseline import Contiguous, simulate_contiguous, simulate_naive
from pagemill.engine.simulator.device import DEVICES
from pagemill.engine.simulator.result import Result
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace
from pagemill.engine.simulator.trace_files import read_trace

_CHOICES = {
    "prefix_caching": ("true", "false"),
    "refuse_late": ("true", "false"),
    "policy": POLICIES,
    "admission": ADMISSIONS,
    "forecast": FORECASTS,
    "preemption_mode": PREEMPTION_MODES,
    "tenants": TENANTS,
}

Report = Callable[[str, float], None]


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Simulate every combination and print it: JSON lines, a table of systems, or a table of swept values."""
    if args.plot:
        from pagemill.engine.simulator.plot import check_plot

        check_plot(Path(args.plot))
    if not 0 <= args.from_s < math.inf:
        raise ConfigError(f"--from-s must not be negative, got {args.from_s:g}")
    for name in ("limit", "longest"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    sweeps = _sweeps(args)
    if args.overload and sweeps:
        raise ConfigError("--overload runs its own table of loads and modes, without --sweep or several block sizes")
    twins = _twins(args.contiguous)
    trace = read_trace(
        Path(args.trace),
        turns=args.turns,
        limit=args.limit,
        clients=args.clients,
        seed=args.seed,
        from_s=args.from_s,
    )
    everything = len(trace.requests)
    trace = trace.shortened(longest=args.longest, limit=args.limit)
    if not trace.requests:
        raise ConfigError(f"no request of {args.trace} has at most {args.longest} tokens")
    if args.times_of:
        trace = _with_times_of(trace, Path(args.times_of))
    if args.classes:
        trace = trace.classified(_shares(args.classes), args.seed)
    arrivals = _arrivals(args, trace)
    cases = []
    with progress_bar() as report:
        if args.overload:
            sent = _sent(trace, args.tenants)
            cases = run_overload(sent, _setup(args), arrivals, args.naive, _named(report, {}))
        for values in () if args.overload else _combinations(sweeps):
            setup, coming = _apply(_setup(args), arrivals, values)
            sent = _sent(trace, values.get("tenants", args.tenants))
            cases.append(Case(values, _run_case(sent, setup, coming, twins, args.naive, _named(report, values))))
    if args.json:
        for case in cases:
            for result in case.results:
                print(json.dumps(case.values | result.to_dict()), flush=True)
    else:
        print_cases(trace, everything, cases, OVERLOAD_COLUMNS if args.overload else SWEEP_COLUMNS)
    if args.plot:
        from pagemill.engine.simulator.plot import plot_overload, plot_run, plot_sweep

        if args.overload:
            plot_overload([(case.values, case.results[0]) for case in cases], Path(args.plot))
        elif len(cases) > 1:
            plot_sweep([(case.values, case.results) for case in cases], Path(args.plot))
        else:
            plot_run(cases[0].results, Path(args.plot))
        print(f"drawn to {args.plot}", file=sys.stderr)
    return 0


# -- what to run -----------------------------------------------------------------------------------------------------


def _sweeps(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    sweeps = []
    if len(args.block_size) > 1:
        sweeps.append(("block_size", [str(size) for size in args.block_size]))
    for text in args.sweep:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in SWEEPS:
            raise ConfigError(f"--sweep knows no {name!r}{nearest(name, SWEEPS)}")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not listed:
            raise ConfigError(f"--sweep {name} needs values: --sweep {name}=A,B,...")
        sweeps.append((name, listed))
    return sweeps


def _combinations(sweeps: Sequence[tuple[str, list[str]]]) -> list[dict[str, str]]:
    names = [name for name, _ in sweeps]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def _twins(text: str) -> list[Contiguous | str]:
    twins: list[Contiguous | str] = []
    for word in text.split(","):
        name = word.strip().lower()
        if name in ("none", ""):
            continue
        if name in ("pow2", "exact", "max"):
            twins.append(name)
        elif name.isdecimal() and int(name):
            twins.append(int(name))
        else:
            raise ConfigError(f"--contiguous takes max, pow2, exact, none or a number of tokens, got {word!r}")
    return twins


def _arrivals(args: argparse.Namespace, trace: Trace) -> Arrivals:
    mode: Mode = args.arrivals or ("trace" if trace.has_times else "sessions" if trace.has_sessions else "backlog")
    return Arrivals(mode=mode, rate=args.rate, rate_scale=args.rate_scale, sessions=args.sessions, seed=args.seed)


def _with_times_of(trace: Trace, path: Path) -> Trace:
    """The trace at the recorded times of another, as many requests as that has."""
    times = [request.arrival_s for request in read_trace(path).requests]
    trace = trace.shortened(limit=len(times))
    return trace.arriving(times[: len(trace.requests)])


def _sent(trace: Trace, tenants: str) -> Trace:
    """The requests of all tenants, or of all but the one that sends most."""
    if tenants == "all":
        return trace
    others = trace.without(trace.heaviest_tenant)
    if not others.requests:
        raise ConfigError(f"trace {trace.name} has one tenant only, so there are no others")
    return others


def _shares(text: str) -> list[float]:
    shares = [_number("--classes", part.strip(), float) for part in text.split(",")]
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"--classes takes up to three shares such as 10,60,30, got {text!r}")
    return shares


def _setup(args: argparse.Namespace) -> Setup:
    device = DEVICES[args.device]
    given = {name.replace("-", "_"): getattr(args, f"{name.replace('-', '_')}_us") for name in TIMINGS}
    changed = {name: value * 1e-6 for name, value in given.items() if value is not None}
    device = dataclasses.replace(device, timing=dataclasses.replace(device.timing, **changed))
    size = args.block_size[0]
    return Setup(
        device=device,
        block_size=size,
        pool_tokens=args.pool_tokens if args.num_blocks is None else args.num_blocks * size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_tokens=_max_tokens(args.max_tokens),
        enable_prefix_caching=not args.no_prefix_caching,
        scheduling_policy=args.policy,
        admission=args.admission,
        forecast=args.forecast,
        max_waiting_requests=args.max_waiting_requests,
        max_waiting_prompt_tokens=args.max_waiting_prompt_tokens,
        refuse_late=not args.accept_late,
        preemption_mode=args.preemption_mode,
        swap_tokens=args.swap_tokens,
        ttl_s=None if args.ttl_ms is None else args.ttl_ms / 1000,
    )


def _max_tokens(text: str) -> int | None:
    return None if text == "exact" else _number("max_tokens", text, int)


def _apply(setup: Setup, arrivals: Arrivals, values: dict[str, str]) -> tuple[Setup, Arrivals]:
    """The swept values in their places."""
    for name, text in values.items():
        if name in ("rate", "rate_scale"):
            arrivals = dataclasses.replace(arrivals, **{name: _number(name, text, float)})
        elif name == "sessions":
            arrivals = dataclasses.replace(arrivals, sessions=_number(name, text, int))
        elif name in _CHOICES:
            if text not in _CHOICES[name]:
                raise ConfigError(f"{name} is one of {', '.join(_CHOICES[name])}, got {text!r}")
            choice: dict[str, Any] = {name: text}
            if name == "tenants":
                continue  # the trace's, not the engine's
            if name == "prefix_caching":
                choice = {"enable_prefix_caching": text == "true"}
            elif name == "refuse_late":
                choice = {name: text == "true"}
            elif name == "policy":
                choice = {"scheduling_policy": text}
            setup = dataclasses.replace(setup, **choice)
        elif name == "ttl_ms":
            ttl_s = None if text == "none" else _number(name, text, float) / 1000
            setup = dataclasses.replace(setup, ttl_s=ttl_s)
        elif name == "max_tokens":
            setup = dataclasses.replace(setup, max_tokens=_max_tokens(text))
        else:
            changes: dict[str, Any] = {name: _number(name, text, int)}
            setup = dataclasses.replace(setup, **changes)
    return setup, arrivals


def _number(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {text!r}") from None


def _named(report: Report, values: dict[str, str]) -> Callable[[str], Progress]:
    """A progress callback for each system of a combination."""

    def of(system: str) -> Progress:
        what = " ".join([system, *(f"{name}={value}" for name, value in values.items())])
        ended = -1

        def progress(done: int, total: int) -> None:
            nonlocal ended
            if done != ended:
                ended = done
                report(what, done / total)

        return progress

    return of


def _run_case(
    trace: Trace,
    setup: Setup,
    arrivals: Arrivals,
    twins: Iterable[Contiguous | str],
    naive: str | None,
    progress: Callable[[str], Progress],
) -> list[Result]:
    results = [simulate(trace, setup, arrivals, progress("pagemill"))]
    if naive:
        budget = setup.budget if naive == "chunks" else None
        results.append(simulate_naive(trace, setup, arrivals, budget, progress("naive paged")))
    for twin in twins:
        size: Any = (setup.max_model_len or trace.longest) if twin == "max" else twin
        results.append(simulate_contiguous(trace, setup, arrivals, size, progress(f"contiguous {twin}")))
    return results
