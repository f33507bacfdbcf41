"""Drawings of simulations, as PNG or SVG. Needs matplotlib (`pip install 'pagemill[plots]'`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.result import Result

FORMATS = (".png", ".svg")

Measures = Sequence[tuple[str, Callable[[Result], float | None]]]


def check_plot(path: Path) -> None:
    """Raise `ConfigError`, before hours of simulation, where a plot could not be drawn to this path."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot is a {' or '.join(FORMATS)} file, got {path}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"there is no folder {path.resolve().parent} for the plot")
    _figure(1)


def plot_run(results: Sequence[Result], path: Path) -> None:
    """One run over time, engine and twins: running, waiting, share of the pool that holds tokens, longest step."""
    figure, panels = _figure(4)
    titles = ("running requests", "waiting requests", "pool holding tokens, %", "longest step, ms")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_ylabel(title)
    for result in results:
        line = result.time_line
        if line is None:
            continue
        seconds = [(index + 0.5) * line.slice_s for index in range(len(line.running))]
        series = (line.running, line.waiting, line.used_percent, line.worst_step_ms)
        for panel, values in zip(panels, series, strict=True):
            panel.plot(seconds, values, label=result.system, linewidth=1.2)
    _finish(figure, panels, "time, s", results[0].trace, path)


_SWEPT: Measures = (
    ("running while others wait", lambda r: r.running_backlogged),
    ("output tokens / s", lambda r: r.output_tokens_per_s),
    ("between tokens, p99 ms", lambda r: r.latency.between_tokens.p99 if r.latency.between_tokens else None),
    ("between tokens, longest ms", lambda r: r.latency.between_tokens.max if r.latency.between_tokens else None),
    ("first token, p99 ms", lambda r: r.latency.ttft.p99 if r.latency.ttft else None),
    ("preemptions per 1,000", lambda r: r.preemptions_per_1000),
    ("refused or failed, % of requests", lambda r: 100 * (1 - r.finished / max(1, r.requests))),
    ("waste over the life, %", lambda r: r.waste_life_percent),
    ("prefix hits, % of prompt tokens", lambda r: r.prefix_hit_percent),
)


_OVERLOAD: Measures = (
    ("between tokens, p99 ms", lambda r: r.latency.between_tokens.p99 if r.latency.between_tokens else None),
    ("longest gap, p99 ms", lambda r: r.latency.longest_gap.p99 if r.latency.longest_gap else None),
    ("time lost to preemption, s", lambda r: r.preempted_s),
    ("first token, p99 s", lambda r: r.latency.ttft.p99 / 1000 if r.latency.ttft else None),
    ("refused or failed, % of requests", lambda r: 100 * (1 - r.finished / max(1, r.requests))),
    ("output tokens / s", lambda r: r.output_tokens_per_s),
)


def plot_overload(cases: Sequence[tuple[dict[str, str], Result]], path: Path) -> None:
    """Offered load along x, a line for each mode."""
    ticks = list(dict.fromkeys(values["load"] for values, _ in cases))
    lines: dict[str, dict[int, Result]] = {}
    for values, result in cases:
        lines.setdefault(values["mode"], {})[ticks.index(values["load"])] = result
    _plot_lines(lines, _OVERLOAD, ticks, "offered load, capacities", cases[0][1].trace, path)


def plot_sweep(cases: Sequence[tuple[dict[str, str], Sequence[Result]]], path: Path) -> None:
    """Results over swept values: the first swept name along x, a line for every combination of the others, and one for
    each twin. What is zero everywhere gets no panel."""
    name = next(iter(cases[0][0]))
    ticks = list(dict.fromkeys(values[name] for values, _ in cases))
    lines: dict[str, dict[int, Result]] = {}
    for values, results in cases:
        others = ", ".join(f"{other} {value}" for other, value in values.items() if other != name)
        for place, result in enumerate(results):
            # A twin knows none of the engine's settings, so its first line stands for all.
            label = (others or result.system) if place == 0 else result.system
            lines.setdefault(label, {}).setdefault(ticks.index(values[name]), result)
    _plot_lines(lines, _SWEPT, ticks, name, cases[0][1][0].trace, path)


def _plot_lines(
    lines: dict[str, dict[int, Result]], measures: Measures, ticks: list[str], along: str, title: str, path: Path
) -> None:
    shown = [
        (measured, measure)
        for measured, measure in measures
        if any(measure(result) for points in lines.values() for result in points.values())
    ]
    figure, panels = _figure(len(shown))
    for panel, (measured, measure) in zip(panels, shown, strict=True):
        panel.set_ylabel(measured)
        panel.set_xticks(range(len(ticks)), ticks)
        for label, points in lines.items():
            known = [(x, y) for x, result in points.items() if (y := measure(result)) is not None]
            style = "o--" if "deadline" in label or "ttl_ms" in label else "o-"  # often on top of the one without
            panel.plot([x for x, _ in known], [y for _, y in known], style, label=label, linewidth=1.2, markersize=3.5)
        panel.set_ylim(bottom=0)
    _finish(figure, panels, along, title, path)


def _figure(count: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("plots need matplotlib: pip install 'pagemill[plots]'") from None
    rows = -(-count // 2)
    figure = Figure(figsize=(11, 2.8 * rows), layout="constrained")
    panels = [figure.add_subplot(rows, 2, place + 1) for place in range(count)]
    return figure, panels


def _finish(figure: Any, panels: list[Any], along: str, title: str, path: Path) -> None:
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.set_xlabel(along)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize="small")
    figure.suptitle(title)
    from matplotlib import rc_context

    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text: a fifth of the size, and it can be searched
            figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
