"""Simulations as text: a table of systems for one run, a table of swept values for several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagemill.engine.simulator.result import Quantiles, Result
from pagemill.engine.simulator.trace import Trace

Columns = Sequence[tuple[str, Callable[[list[Result]], str]]]


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of swept values, and what the engine and its twins made of it."""

    values: dict[str, str]
    results: list[Result]


def print_cases(trace: Trace, everything: int, cases: list[Case], columns: Columns) -> None:
    """One case: a table of its systems. Several: of `columns`, the cases below each other. `everything`: how many
    requests the trace file holds."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(_headline(trace, everything, cases[0].results[0], len(cases) > 1), soft_wrap=True)
    table = Table()
    if len(cases) > 1:
        for name in cases[0].values:
            table.add_column(name, justify="right", no_wrap=True)
        cells_of = [(title, [cell(case.results) for case in cases]) for title, cell in columns]
        cells_of = [(title, cells) for title, cells in cells_of if not _NOTHING.issuperset(cells)]
        for title, _ in cells_of:
            table.add_column(title, justify="right", no_wrap=True)
        for place, case in enumerate(cases):
            table.add_row(*case.values.values(), *(cells[place] for _, cells in cells_of))
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
    (
        "  requests, time lost",
        lambda r, _: f"{r.preempted_requests:,}, {r.preempted_s:,.1f} s" if r.preemptions else "",
    ),
    ("recomputed tokens", lambda r, _: f"{r.recomputed_tokens:,}"),
    ("prefix hits", lambda r, _: f"{r.prefix_hit_percent:.1f} %" if r.prefix_queried_tokens else ""),
    ("queue ms p50/p90/p99", lambda r, _: _quantiles(r.latency.queue)),
    ("first token ms", lambda r, _: _quantiles(r.latency.ttft)),
    ("between tokens ms", lambda r, _: _quantiles(r.latency.between_tokens)),
    ("  a request's longest", lambda r, _: _quantiles(r.latency.longest_gap)),
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


def _others(result: Result) -> str:
    """First tokens of all tenants but the heaviest, where they are a group."""
    return next((_quantiles(g.ttft) for g in result.groups if g.name.endswith((" other", " others"))), "-")


_NOTHING = frozenset(("-", "0.0", "0, 0"))

SWEEP_COLUMNS: Columns = (
    ("running", lambda c: f"{c[0].running_backlogged:.1f}" if c[0].running_backlogged else "-"),
    ("x contig.", lambda c: next((t for r in c if "contiguous" in r.system and (t := _times_as_many(r, c[0]))), "-")),
    ("waste %", lambda c: f"{c[0].waste_life_percent:.2f} / {c[0].waste_end_percent:.2f}"),
    ("preempted\n/ 1,000", lambda c: f"{c[0].preemptions_per_1000:.1f}"),
    ("prefix\nhits %", lambda c: f"{c[0].prefix_hit_percent:.1f}"),
    ("refused,\nfailed", lambda c: f"{sum(c[0].refused.values()):,}, {sum(c[0].failed.values()):,}"),
    ("first token ms\np50 / p90 / p99", lambda c: _quantiles(c[0].latency.ttft)),
    ("others' first\ntoken ms", lambda c: _others(c[0])),
    ("between tokens ms\np50 / p90 / p99", lambda c: _quantiles(c[0].latency.between_tokens)),
    ("output\ntokens/s", lambda c: f"{c[0].output_tokens_per_s:,.0f}"),
)


def _useful(result: Result) -> str:
    return f"{result.output_tokens_per_s:,.0f}, {100 * result.wasted_tokens / max(1, result.output_tokens):.0f} %"


def _refusals(result: Result) -> str:
    clock, code = result.refusal_ms, result.refusal_cpu_us
    return f"{clock.max:.0f} ms, {code.p99:.0f} us" if clock is not None and code is not None else "-"


OVERLOAD_COLUMNS: Columns = (
    ("between tokens ms\np50 / p90 / p99", lambda c: _quantiles(c[0].latency.between_tokens)),
    ("a request's longest\nms p50 / p90 / p99", lambda c: _quantiles(c[0].latency.longest_gap)),
    ("preempted\nrequests, s", lambda c: f"{c[0].preempted_requests:,}, {c[0].preempted_s:,.0f}"),
    ("first token\np50 / p90 / p99 ms", lambda c: _quantiles(c[0].latency.ttft)),
    ("refused,\nfailed", lambda c: f"{sum(c[0].refused.values()):,}, {sum(c[0].failed.values()):,}"),
    ("refused after,\ncode p99", lambda c: _refusals(c[0])),
    ("output tokens/s,\nof failed", lambda c: _useful(c[0])),
)
