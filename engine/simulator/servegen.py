"""Drawing traffic from ServeGen's per-client fits (Alibaba, arXiv 2505.09999).

Each client has, for windows of 600 s, a fitted distribution of the gaps between its requests, and quantiles of its
prompt and output lengths. Clients are drawn apart from each other and merged, which keeps what matters for fairness: a
few clients make most of the load, in bursts.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.engine.errors import ConfigError

WINDOW_S = 600.0
QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
DEFAULT_REQUESTS = 20_000

Drawn = tuple[float, str, int, int]  # arrival s, client, prompt tokens, output tokens


def sample_clients(
    clients: list[dict[str, Any]], model: str | None, limit: int | None, seed: int, from_s: float = 0.0
) -> list[Drawn]:
    """The first `limit` requests (20,000) of all clients of a model, by arrival. `from_s`: leave out those of the first
    so many seconds. A request is the same whatever the limit and the start."""
    models = list(dict.fromkeys(str(client["model"]) for client in clients))
    chosen = models[0] if model is None else model
    if chosen not in models:
        raise ConfigError(f"no clients of {chosen!r} in this trace; it has {', '.join(models)}")
    mine = [client for client in clients if client["model"] == chosen]
    windows = sorted({float(window[0]) for client in mine for window in client["arrivals"]})
    wanted = limit or DEFAULT_REQUESTS
    begin = windows[0] + from_s
    drawn: list[Drawn] = []
    for start in windows:
        if start + WINDOW_S <= begin:
            continue
        if len(drawn) >= wanted:
            break
        for client in mine:
            for window in client["arrivals"]:
                if float(window[0]) == start:
                    drawn += (request for request in _window(client, window, seed) if request[0] >= begin)
    drawn.sort()
    return drawn[:wanted]


def _window(client: dict[str, Any], window: list[Any], seed: int) -> list[Drawn]:
    start, rate, _, family, *fit = window
    name = f"{client['model']}/{client['client']}"
    random = np.random.default_rng([seed, zlib.crc32(f"{name}/{start}".encode())])
    times = _times(random, float(rate), str(family), fit) + float(start)
    lengths = [_lengths(random, client[field], len(times)) for field in ("input_tokens", "output_tokens")]
    return [(float(time), name, int(p), int(o)) for time, p, o in zip(times, *lengths, strict=True)]


def _times(random: np.random.Generator, rate: float, family: str, fit: list[float]) -> NDArray[np.float64]:
    """Arrivals within the window, in seconds from its start."""
    expected = int(rate * WINDOW_S) + 1
    drawn: list[NDArray[np.float64]] = []
    reached = 0.0
    while reached < WINDOW_S:
        if family == "Gamma":
            gaps = random.gamma(fit[0], fit[1], expected)
        elif family == "Weibull":
            gaps = random.weibull(fit[0], expected) * fit[1]
        else:
            gaps = random.exponential(1.0 / rate, expected)
        drawn.append(np.cumsum(gaps) + reached)
        reached = float(drawn[-1][-1])
    times = np.concatenate(drawn)
    return times[times < WINDOW_S]


def _lengths(random: np.random.Generator, quantiles: list[float], count: int) -> NDArray[np.int64]:
    lengths = np.interp(random.random(count), QUANTILES, quantiles)
    return np.maximum(1, np.rint(lengths)).astype(np.int64)
