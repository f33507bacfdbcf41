"""`pagemill bench simulate`: a recorded trace through the engine's own scheduler, on a modelled device."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings, nearest
from pagemill.adapters.cli.simulate_flags import ADMISSIONS, POLICIES, PREEMPTION_MODES, SWEEPS, TIMINGS
from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals, Mode
from pagemill.engine.simulator.baseline import Contiguous, simulate_contiguous, simulate_naive
from pagemill.engine.simulator.device import DEVICES
from pagemill.engine.simulator.result import Quantiles, Result
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace
from pagemill.engine.simulator.trace_files import read_trace

_CHOICES = {
    "prefix_caching": ("true", "false"),
    "refuse_late": ("true", "false"),
    "policy": POLICIES,
    "admission": ADMISSIONS,
    "preemption_mode": PREEMPTION_MODES,
}

Report = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One combination of swept values, and what the engine and its twins made of it."""

    values: dict[str, str]
    results: list[Result]


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Simulate every combination and print it: JSON lines, a table of systems, or a table of swept values."""
    if args.plot:
        from pagemill.engine.simulator.plot import check_plot

        check_plot(Path(args.plot))
    for name in ("limit", "longest"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    sweeps = _sweeps(args)
    twins = _twins(args.contiguous)
    trace = read_trace(Path(args.trace), turns=args.turns, limit=args.limit, clients=args.clients, seed=args.seed)
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
        for values in _combinations(sweeps):
            setup, coming = _apply(_setup(args), arrivals, values)
            cases.append(Case(values, _run_case(trace, setup, coming, twins, args.naive, _named(report, values))))
    if args.json:
        for case in cases:
            for result in case.results:
                print(json.dumps(case.values | result.to_dict()), flush=True)
    else:
        _print(trace, everything, cases)
    if args.plot:
        from pagemill.engine.simulator.plot import plot_run, plot_sweep

        if len(cases) > 1:
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
    naive: bool,
    progress: Callable[[str], Progress],
) -> list[Result]:
    results = [simulate(trace, setup, arrivals, progress("pagemill"))]
    if naive:
        results.append(simulate_naive(trace, setup, arrivals, progress=progress("naive paged")))
    for twin in twins:
        size: Any = (setup.max_model_len or trace.longest) if twin == "max" else twin
        results.append(simulate_contiguous(trace, setup, arrivals, size, progress(f"contiguous {twin}")))
    return results


# -- what to print ---------------------------------------------------------------------------------------------------


def _print(trace: Trace, everything: int, cases: list[Case]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(_headline(trace, everything, cases[0].results[0], len(cases) > 1), soft_wrap=True)
    table = Table()
    if len(cases) > 1:
        for name in cases[0].values:
            table.add_column(name, justify="right", no_wrap=True)
        columns = [(title, [cell(case.results) for case in cases]) for title, cell in _SWEEP_COLUMNS]
        columns = [(title, cells) for title, cells in columns if not _NOTHING.issuperset(cells)]
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for place, case in enumerate(cases):
            table.add_row(*case.values.values(), *(cells[place] for _, cells in columns))
    else:
        results = cases[0].results
        table.add_column("", no_wrap=True)
        for result in results:
            table.add_column(result.system, justify="right", no_wrap=True)
        for title, of in _rows(results):
            cells = [of(result, results[0]) for result in results]
            if any(cells):
                table.add_row(title, *cells)
    console.print(table)


def _headline(trace: Trace, everything: int, result: Result, swept: bool) -> str:
    settings = result.settings
    left_out = f" of {everything:,}" if len(trace.requests) < everything else ""
    dropped = f" ({trace.dropped} empty rows dropped)" if trace.dropped else ""
    lengths = sorted(request.prompt_tokens for request in trace.requests)
    outputs = sorted(request.output_tokens for request in trace.requests)
    details = f"; arrivals {settings['arrivals']}; pool of {settings['pool_tokens']:,} tokens in blocks of "
    return (
        f"{trace.name}: {len(lengths):,}{left_out} requests{dropped}, median prompt {lengths[len(lengths) // 2]:,} "
        f"tokens, median output {outputs[len(outputs) // 2]:,}; on {settings['device']}"
        f"{'' if swept else details + str(settings['block_size'])}"
    )


def _quantiles(q: Quantiles | None) -> str:
    if q is None:
        return "-"
    unit, scale = (" s", 1000) if q.p99 >= 10_000 else ("", 1)
    values = [value / scale for value in (q.p50, q.p90, q.p99)]
    return " / ".join(f"{v:,.0f}" if v >= 100 else f"{v:.1f}" for v in values) + unit


def _codes(counts: dict[str, int]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in counts.items())


def _times_as_many(result: Result, engine: Result) -> str:
    if result is engine or not result.running_backlogged or not engine.running_backlogged:
        return ""
    return f"{engine.running_backlogged / result.running_backlogged:.2f} x"


_Cell = Callable[[Result, Result], str]

_ROWS: tuple[tuple[str, _Cell], ...] = (
    ("finished, cut short", lambda r, _: f"{r.finished:,}, {r.cut_short:,}"),
    ("refused", lambda r, _: _codes(r.refused) or "0"),
    ("failed", lambda r, _: _codes(r.failed)),
    ("running, mean / peak", lambda r, _: f"{r.running_mean:.1f} / {r.running_peak:,}"),
    ("running while others wait", lambda r, _: f"{r.running_backlogged:.1f}" if r.running_backlogged else "-"),
    ("  pagemill runs", _times_as_many),
    ("pool holding tokens", lambda r, _: f"{r.used_percent:.1f} %"),
    ("waste, life / end", lambda r, _: f"{r.waste_life_percent:.2f} / {r.waste_end_percent:.2f} %"),
    ("preemptions, per 1,000", lambda r, _: f"{r.preemptions:,}, {r.preemptions_per_1000:.1f}"),
    ("  of them swapped out", lambda r, _: f"{r.swap_preemptions:,}" if r.swap_preemptions else ""),
    ("recomputed tokens", lambda r, _: f"{r.recomputed_tokens:,}"),
    ("prefix hits", lambda r, _: f"{r.prefix_hit_percent:.1f} %" if r.prefix_queried_tokens else ""),
    ("queue ms p50/p90/p99", lambda r, _: _quantiles(r.latency.queue)),
    ("first token ms", lambda r, _: _quantiles(r.latency.ttft)),
    ("between tokens ms", lambda r, _: _quantiles(r.latency.between_tokens)),
    ("total ms", lambda r, _: _quantiles(r.latency.total)),
    ("refusal ms", lambda r, _: _quantiles(r.refusal_ms) if r.refusal_ms else ""),
    ("output tokens / s", lambda r, _: f"{r.output_tokens_per_s:,.0f}"),
    ("requests / s", lambda r, _: f"{r.requests_per_s:.2f}"),
    ("steps, duration", lambda r, _: f"{r.steps:,}, {r.duration_s:,.1f} s"),
)


def _rows(results: list[Result]) -> Iterator[tuple[str, _Cell]]:
    """The rows, with one for each group of requests after that of all."""
    for title, of in _ROWS:
        yield title, of
        if title == "first token ms":
            for place, group in enumerate(results[0].groups):
                yield f"  {group.name}, {group.share_percent:.0f} %", _group_cell(place)


def _group_cell(place: int) -> _Cell:
    return lambda result, _: _quantiles(result.groups[place].ttft)


_NOTHING = frozenset(("-", "0.0", "0, 0"))

_SWEEP_COLUMNS: tuple[tuple[str, Callable[[list[Result]], str]], ...] = (
    ("running", lambda c: f"{c[0].running_backlogged:.1f}" if c[0].running_backlogged else "-"),
    ("x contig.", lambda c: next((t for r in c if "contiguous" in r.system and (t := _times_as_many(r, c[0]))), "-")),
    ("waste %", lambda c: f"{c[0].waste_life_percent:.2f} / {c[0].waste_end_percent:.2f}"),
    ("preempted\n/ 1,000", lambda c: f"{c[0].preemptions_per_1000:.1f}"),
    ("prefix\nhits %", lambda c: f"{c[0].prefix_hit_percent:.1f}"),
    ("refused,\nfailed", lambda c: f"{sum(c[0].refused.values()):,}, {sum(c[0].failed.values()):,}"),
    ("first token ms\np50 / p90 / p99", lambda c: _quantiles(c[0].latency.ttft)),
    ("between tokens ms\np50 / p90 / p99", lambda c: _quantiles(c[0].latency.between_tokens)),
    ("output\ntokens/s", lambda c: f"{c[0].output_tokens_per_s:,.0f}"),
)
