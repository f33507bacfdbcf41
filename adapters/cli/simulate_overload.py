"""`pagemill bench simulate --overload`: the engine below, at and above its capacity, with protection and without."""

from __future__ import annotations

from collections.abc import Callable

from pagemill.adapters.cli.simulate_tables import Case
from pagemill.engine.simulator.arrivals import Arrivals
from pagemill.engine.simulator.baseline import simulate_naive
from pagemill.engine.simulator.overload import LOADS, capacity, modes, offered
from pagemill.engine.simulator.setup import Progress, Setup
from pagemill.engine.simulator.simulation import simulate
from pagemill.engine.simulator.trace import Trace


def run_overload(
    trace: Trace, setup: Setup, arrivals: Arrivals, naive: str | None, progress: Callable[[str], Progress]
) -> list[Case]:
    """Every mode at every load, and the naive twin where it is asked for. `progress` makes a callback for what runs."""
    most = capacity(trace, setup, progress("capacity"))
    cases = []
    for load in LOADS:
        coming = offered(trace, arrivals, load * most)
        for mode, changed in modes(setup).items():
            result = simulate(trace, changed, coming, progress(f"load {load:g} {mode}"))
            cases.append(Case({"load": f"{load:g}", "mode": mode}, [result]))
        if naive:
            budget = setup.budget if naive == "chunks" else None
            result = simulate_naive(trace, setup, coming, budget, progress(f"load {load:g} naive"))
            cases.append(Case({"load": f"{load:g}", "mode": "naive twin"}, [result]))
    return cases
