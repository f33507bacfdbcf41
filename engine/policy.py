"""Who is admitted next: the order of the waiting requests.

Three orders behind one protocol. `fcfs`: by arrival. `priority`: three classes, by arrival within one; a request that
has waited `AGEING_S` may not be passed over for ever. `fair`: every tenant gets the same service while it wants some,
measured in tokens, whatever the others send (virtual token counters, arXiv 2401.00588); a tenant's own requests are
ordered as under `priority`. Classes do not count between tenants: otherwise calling everything urgent would buy
service.

Ageing is a share, not a rank that grows with time: with the latter, 10,000 batch requests sent an hour ago stand before
every urgent request of now. Here the oldest overdue request gets one admission in `AGED_TURN`, so the urgent ones keep
the rest and nobody starves: **a request that has waited `AGEING_S`, with b overdue requests older than it, is admitted
at the latest with the AGED_TURN * (b + 1)-th admission from then on.**

Preempted requests are not in these queues; the scheduler serves them first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Protocol

from pagemill.engine.config import SchedulingPolicy
from pagemill.engine.request import Request

CLASSES = 3  # 0 high, 1 normal, 2 batch
AGEING_S = 30.0  # after this wait a request may take the turn of a higher class
AGED_TURN = 4  # of so many admissions one goes to the oldest such request
PROMPT_WEIGHT = 1  # service of a computed prompt token
OUTPUT_WEIGHT = 2  # service of a generated token: it takes a step of its own
MAX_IDLE_TENANTS = 1024  # counters remembered of tenants that have nothing waiting


def _class_of(request: Request) -> int:
    return min(max(request.priority, 0), CLASSES - 1)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Waiting work: requests, and the tokens they bring along."""

    requests: int
    tokens: int


class WaitingQueue(Protocol):
    """The waiting requests in the order of a policy. Every operation but `ahead_of` is O(log n) or better."""

    def add(self, request: Request) -> None:
        """Queue a request whose `arrived_at` is set. Several choices of one request are queued one by one."""
        ...

    def remove(self, request: Request) -> bool:
        """Take a request out because it is admitted or has ended. False: it is not here."""
        ...

    def __contains__(self, request: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, in no particular order."""
        ...

    def candidates(self, limit: int) -> list[Request]:
        """The first `limit` requests in the order in which they should be admitted now. O(limit)."""
        ...

    def charge(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Service was given: the prompt tokens to compute, once, when a request is first admitted; its output tokens
        as they come, a few at a time. What a preemption recomputes is nobody's service. O(1)."""
        ...

    def ahead_of(self, request: Request) -> Backlog:
        """What would be admitted before this request if it were added now and nothing else came."""
        ...


class FcfsQueue:
    """By arrival."""

    def __init__(self) -> None:
        # Not a dict: taking the head of a dict again and again walks over all that was taken before.
        self._requests: OrderedDict[Request, int] = OrderedDict()  # with its tokens when it came
        self.num_tokens = 0

    def add(self, request: Request) -> None:
        self._requests[request] = request.num_tokens
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> bool:
        tokens = self._requests.pop(request, None)
        if tokens is None:
            return False
        self.num_tokens -= tokens
        return True

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def candidates(self, limit: int) -> list[Request]:
        return list(islice(self._requests, limit))

    def charge(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        pass

    def ahead_of(self, request: Request) -> Backlog:
        return Backlog(len(self._requests), self.num_tokens)


class PriorityQueue:
    """By class, then by arrival; one admission in `AGED_TURN` for the oldest request that waited `AGEING_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._classes = tuple(FcfsQueue() for _ in range(CLASSES))
        self._turn = 0  # admissions since the last one out of class order

    def add(self, request: Request) -> None:
        self._classes[_class_of(request)].add(request)

    def remove(self, request: Request) -> bool:
        return self._classes[_class_of(request)].remove(request)

    def __contains__(self, request: object) -> bool:
        return any(request in queue for queue in self._classes)

    def __len__(self) -> int:
        return sum(map(len, self._classes))

    def __iter__(self) -> Iterator[Request]:
        for queue in self._classes:
            yield from queue

    @property
    def num_tokens(self) -> int:
        return sum(queue.num_tokens for queue in self._classes)

    def candidates(self, limit: int) -> list[Request]:
        return list(islice(self.in_order(), limit))

    def in_order(self) -> Iterator[Request]:
        """The order of admission, as far as it is asked for. The queue must not change meanwhile."""
        overdue = self._clock() - AGEING_S
        turn = self._turn
        lines = [iter(queue) for queue in self._classes]
        heads = [next(line, None) for line in lines]
        while True:
            first = next((index for index, head in enumerate(heads) if head is not None), None)
            if first is None:
                return
            chosen = first
            if turn >= AGED_TURN - 1:
                aged = [(head.arrived_at, i) for i, head in enumerate(heads) if head and head.arrived_at <= overdue]
                if aged:
                    chosen = min(aged)[1]
            turn = 0 if chosen != first else turn + 1
            head = heads[chosen]
            assert head is not None
            heads[chosen] = next(lines[chosen], None)
            yield head

    def charge(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        if prompt_tokens and not request.num_preemptions:
            passed = any(len(queue) for queue in self._classes[: _class_of(request)])
            self._turn = 0 if passed else self._turn + 1

    def ahead_of(self, request: Request) -> Backlog:
        ahead = [queue.ahead_of(request) for queue in self._classes[: _class_of(request) + 1]]
        return Backlog(sum(a.requests for a in ahead), sum(a.tokens for a in ahead))


@dataclass(slots=True, eq=False)
class _Tenant:
    lane: PriorityQueue
    service: int
    entry: tuple[int, int, str] | None = None  # its entry in the heap, exactly while it has waiting requests


@dataclass(slots=True)
class _Trial:
    """A tenant during one `candidates`: what it would have been served if those chosen so far were admitted."""

    requests: Iterator[Request]
    next: Request | None = field(init=False)

    def __post_init__(self) -> None:
        self.next = next(self.requests, None)

    def take(self) -> Request:
        request = self.next
        assert request is not None
        self.next = next(self.requests, None)
        return request


class FairQueue:
    """The tenant that was served least comes first.

    A tenant that starts or comes back to wait begins at the least service of those waiting (nobody waiting: at that of
    the last to leave), if its own is less: idling earns no credit. If its own is more it keeps that: leaving pays no
    debt.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: set[Request] = set()
        self._tenants: dict[str, _Tenant] = {}
        # (service, order of becoming active, tenant). Service only grows, so an entry is never too late in the heap;
        # it is brought up to date when it comes to the top. An entry that its tenant does not hold is dead.
        self._heap: list[tuple[int, int, str]] = []
        self._activations = 0
        self._active = 0
        self._last_to_leave: _Tenant | None = None

    def add(self, request: Request) -> None:
        tenant = self._tenant(request.tenant)
        if tenant.entry is None:
            tenant.service = max(tenant.service, self._least_service())
            self._activations += 1
            self._active += 1
            tenant.entry = (tenant.service, self._activations, request.tenant)
            heappush(self._heap, tenant.entry)
            if len(self._heap) > 2 * self._active + 64:
                self._drop_dead_entries()
        tenant.lane.add(request)
        self._requests.add(request)

    def remove(self, request: Request) -> bool:
        if request not in self._requests:
            return False
        self._requests.remove(request)
        tenant = self._tenants[request.tenant]
        tenant.lane.remove(request)
        if not len(tenant.lane):
            tenant.entry = None
            self._active -= 1
            self._last_to_leave = tenant
        return True

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def candidates(self, limit: int) -> list[Request]:
        chosen: list[Request] = []
        taken: list[tuple[int, int, str]] = []
        trials: list[tuple[int, int, _Trial]] = []
        while len(chosen) < limit:
            top = self._top()
            if top is not None and (not trials or top[:2] < trials[0][:2]):
                taken.append(heappop(self._heap))
                service, order, trial = top[0], top[1], _Trial(self._tenants[top[2]].lane.in_order())
            elif trials:
                service, order, trial = heappop(trials)
            else:
                break
            request = trial.take()
            chosen.append(request)
            if trial.next is not None:
                heappush(trials, (service + PROMPT_WEIGHT * request.num_tokens, order, trial))
        for entry in taken:
            heappush(self._heap, entry)
        return chosen

    def charge(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        tenant = self._tenant(request.tenant)
        tenant.service += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        tenant.lane.charge(request, prompt_tokens=prompt_tokens)

    def ahead_of(self, request: Request) -> Backlog:
        """Its tenant's requests before it, and of every other tenant as many. O(tenants that wait)."""
        own = self._tenants.get(request.tenant)
        before = own.lane.ahead_of(request) if own is not None else Backlog(0, 0)
        requests, tokens = before.requests, before.tokens
        for tenant in self._tenants.values():
            if tenant.entry is not None and tenant is not own:
                count = len(tenant.lane)
                share = min(count, before.requests + 1)
                requests += share
                tokens += share * tenant.lane.num_tokens // count
        return Backlog(requests, tokens)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) - self._active >= MAX_IDLE_TENANTS:
                self._forget_idle()
            tenant = self._tenants[name] = _Tenant(PriorityQueue(self._clock), self._least_service())
        return tenant

    def _top(self) -> tuple[int, int, str] | None:
        """The heap's first entry, once it is neither dead nor out of date."""
        heap = self._heap
        while heap:
            entry = heap[0]
            tenant = self._tenants.get(entry[2])
            if tenant is None or tenant.entry is not entry:
                heappop(heap)
            elif tenant.service != entry[0]:
                tenant.entry = (tenant.service, entry[1], entry[2])
                heapreplace(heap, tenant.entry)
            else:
                return entry
        return None

    def _drop_dead_entries(self) -> None:
        self._heap = [tenant.entry for tenant in self._tenants.values() if tenant.entry is not None]
        heapify(self._heap)

    def _least_service(self) -> int:
        top = self._top()
        if top is not None:
            return top[0]
        return self._last_to_leave.service if self._last_to_leave is not None else 0

    def _forget_idle(self) -> None:
        """Drop the half of the idle tenants that owes least: they would be lifted at their return anyway, or nearly."""
        idle = sorted((tenant.service, name) for name, tenant in self._tenants.items() if tenant.entry is None)
        for _, name in idle[: len(idle) // 2]:
            del self._tenants[name]


def make_queue(policy: SchedulingPolicy, clock: Callable[[], float]) -> WaitingQueue:
    """The queue of a `scheduling_policy`. `clock`: seconds, the one that sets `Request.arrived_at`."""
    if policy == "fcfs":
        return FcfsQueue()
    if policy == "priority":
        return PriorityQueue(clock)
    return FairQueue(clock)
