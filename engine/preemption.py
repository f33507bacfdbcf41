"""Which running request gives way when the pool is full."""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.engine.request import Request

MAX_PREEMPTIONS = 3


def is_protected(request: Request) -> bool:
    """Preempted often enough: from now on it is admitted only with its whole need promised, and never gives way."""
    return request.num_preemptions >= MAX_PREEMPTIONS


def choose_victim(running: Iterable[Request], last_victim: Request | None) -> Request | None:
    """The request that loses least: of the lowest class the one with the fewest computed tokens, the latest arrival
    among equals. The last victim is spared while there is another; protected requests never give way.

    Rejected: the last admitted whatever its progress. Choosing the least computed alone cuts the recomputed tokens by
    a quarter to two fifths in vLLM's own measurements (its pull request 53723).
    """
    best: Request | None = None
    for request in running:
        if is_protected(request):
            continue
        if best is None or _loss(request, last_victim) <= _loss(best, last_victim):
            best = request
    return best


def _loss(request: Request, last_victim: Request | None) -> tuple[bool, int, int]:
    return (request is last_victim, -request.priority, request.num_computed_tokens)
