"""Waiting queues against naive twins, and the promises of each policy: ageing, fairness, no credit, no debt paid."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from pagemill.engine.policy import (
    AGED_TURN,
    AGEING_S,
    MAX_IDLE_TENANTS,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Backlog,
    FairQueue,
    FcfsQueue,
    PriorityQueue,
    SchedulingPolicy,
    WaitingQueue,
    make_queue,
)
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(name: str, clock: Clock, *, tenant: str = "a", priority: int = 1, tokens: int = 1) -> Request:
    request = Request(name, [0] * tokens, SamplingParams(max_tokens=8), 0, 8, tenant=tenant, priority=priority)
    request.arrived_at = clock.now
    return request


def admit(queue: WaitingQueue) -> Request:
    """What the scheduler does with the first candidate."""
    [request] = queue.candidates(1)
    assert queue.remove(request)
    queue.charge(request, prompt_tokens=request.num_tokens)
    return request


# -- naive twins ---------------------------------------------------------------------------------------------------


class NaiveFcfs:
    """A list in order of arrival."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []

    def order(self) -> Iterator[Request]:
        return iter(self.waiting)

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def activate(self, request: Request) -> None:
        pass

    def deactivate(self, request: Request) -> None:
        pass


class NaivePriority(NaiveFcfs):
    """Looks at everybody for every pick."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.turn = 0

    def order(self) -> Iterator[Request]:
        left, turn = list(self.waiting), self.turn
        while left:
            top = min(request.priority for request in left)
            pick = next(request for request in left if request.priority == top)
            overdue = [request for request in left if self.clock() - request.arrived_at >= AGEING_S]
            turn += 1
            if turn >= AGED_TURN and overdue:
                # Of a class only the first can be next, so the oldest overdue one is one of the heads.
                pick = min(overdue, key=lambda request: (request.arrived_at, request.priority))
            if pick.priority != top:
                turn = 0
            left.remove(pick)
            yield pick

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens:
            passed = any(other.priority < request.priority for other in self.waiting)
            self.turn = 0 if passed else self.turn + 1


class NaiveFair(NaiveFcfs):
    """Counters of every tenant ever seen; the least is found by looking at all."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.service: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.lanes: dict[str, NaivePriority] = {}
        self.last: str | None = None
        self.activations = 0

    def active(self) -> set[str]:
        return {request.tenant for request in self.waiting}

    def floor(self) -> int:
        active = self.active()
        if active:
            return min(self.service[tenant] for tenant in active)
        return self.service[self.last] if self.last is not None else 0

    def activate(self, request: Request) -> None:
        if request.tenant not in self.active():
            self.service[request.tenant] = max(self.service.get(request.tenant, 0), self.floor())
            self.activations += 1
            self.since[request.tenant] = self.activations
        self.lanes.setdefault(request.tenant, NaivePriority(self.clock)).waiting.append(request)

    def deactivate(self, request: Request) -> None:
        self.lanes[request.tenant].waiting.remove(request)
        if request.tenant not in self.active():
            self.last = request.tenant

    def order(self) -> Iterator[Request]:
        lines = {tenant: list(self.lanes[tenant].order()) for tenant in self.active()}
        service = dict(self.service)
        while lines:
            tenant = min(lines, key=lambda name: (service[name], self.since[name]))
            request = lines[tenant].pop(0)
            service[tenant] += PROMPT_WEIGHT * request.num_tokens
            if not lines[tenant]:
                del lines[tenant]
            yield request

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self.service[request.tenant] += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self.lanes[request.tenant].charge(request, prompt_tokens, 0)


TWINS: dict[SchedulingPolicy, Callable[[Clock], NaiveFcfs]] = {
    "fcfs": lambda clock: NaiveFcfs(),
    "priority": NaivePriority,
    "fair": NaiveFair,
}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_every_policy_orders_like_its_naive_twin(policy: SchedulingPolicy) -> None:
    """Random arrivals, admissions (not always of the first), aborts, charges and passing time."""
    for seed in range(60):
        rng = random.Random(seed)
        clock = Clock()
        queue, twin = make_queue(policy, clock), TWINS[policy](clock)
        known: list[Request] = []
        for number in range(120):
            action = rng.random()
            if action < 0.5:
                request = make(
                    f"r{number}",
                    clock,
                    tenant=rng.choice("abcde"),
                    priority=rng.randrange(3),
                    tokens=rng.randrange(1, 30),
                )
                twin.activate(request)
                twin.waiting.append(request)
                queue.add(request)
                known.append(request)
            elif action < 0.8 and twin.waiting:
                request = rng.choice(queue.candidates(3)[:2])
                assert queue.remove(request)
                twin.waiting.remove(request)
                twin.deactivate(request)
                queue.charge(request, prompt_tokens=request.num_tokens)
                twin.charge(request, request.num_tokens, 0)
            elif action < 0.85 and twin.waiting:
                request = rng.choice(twin.waiting)
                assert queue.remove(request)
                twin.waiting.remove(request)
                twin.deactivate(request)
            elif action < 0.95 and known:
                request = rng.choice(known)
                queue.charge(request, output_tokens=7)
                twin.charge(request, 0, 7)
            else:
                clock.now += rng.choice((0.5, AGEING_S / 3, AGEING_S))
            expected = [request.request_id for request in twin.order()]
            for limit in (0, 1, 4, 1000):
                assert [request.request_id for request in queue.candidates(limit)] == expected[:limit], (seed, number)
            assert len(queue) == len(expected)
            assert set(queue) == set(twin.waiting)
            assert all(request in queue for request in twin.waiting)
        stranger = make("stranger", clock)
        assert stranger not in queue and not queue.remove(stranger)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_is_ahead_is_what_would_be_admitted_before(policy: SchedulingPolicy) -> None:
    """Exact where requests are alike and nothing is overdue."""
    for seed in range(40):
        rng = random.Random(seed)
        clock = Clock()
        queue = make_queue(policy, clock)
        for number in range(rng.randrange(40)):
            queue.add(make(f"r{number}", clock, tenant=rng.choice("abc"), priority=rng.randrange(3), tokens=4))
        newcomer = make("new", clock, tenant="a", priority=rng.randrange(3), tokens=4)
        ahead = queue.ahead_of(newcomer)
        queue.add(newcomer)
        place = [request.request_id for request in queue.candidates(1000)].index("new")
        # Under fair, tenants with equal service go by who came first: one request each of doubt.
        doubt = 2 if policy == "fair" else 0
        assert abs(ahead.requests - place) <= doubt
        assert ahead.tokens == 4 * ahead.requests


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_first_candidates_cost_the_same_with_many_waiting(policy: SchedulingPolicy) -> None:
    def cost(waiting: int) -> int:
        clock = Clock()
        queue = make_queue(policy, clock)
        for number in range(waiting):
            queue.add(make(f"r{number}", clock, tenant=f"t{number % 7}", priority=number % 3))
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            queue.candidates(8)
        finally:
            sys.setprofile(None)
        return calls

    assert cost(20_000) < 2 * cost(200)  # a heap's depth counts; a finalizer may run in between


# -- priority ------------------------------------------------------------------------------------------------------


def test_classes_go_in_order_while_nobody_is_overdue() -> None:
    clock = Clock()
    queue = PriorityQueue(clock)
    for number in range(30):
        queue.add(make(f"r{number}", clock, priority=number % 3))
    assert [admit(queue).priority for _ in range(30)] == [0] * 10 + [1] * 10 + [2] * 10


def test_an_overdue_request_is_admitted_within_the_bound() -> None:
    """Urgent requests without end; b batch requests older than the one watched: at most AGED_TURN * (b + 1)."""
    for older in (0, 1, 5):
        clock = Clock()
        queue = PriorityQueue(clock)
        for number in range(older + 1):
            watched = make(f"batch{number}", clock, priority=2)
            queue.add(watched)
        urgent = 0
        for _ in range(20):
            queue.add(make(f"urgent{urgent}", clock, priority=0))
            urgent += 1
            assert admit(queue).priority == 0  # nobody is overdue yet
        clock.now += AGEING_S
        admissions = 0
        while watched in queue:
            queue.add(make(f"urgent{urgent}", clock, priority=0))
            urgent += 1
            admit(queue)
            admissions += 1
        assert admissions <= AGED_TURN * (older + 1)


def test_an_old_batch_backlog_leaves_urgent_requests_their_share() -> None:
    clock = Clock()
    queue = PriorityQueue(clock)
    for number in range(1000):
        queue.add(make(f"batch{number}", clock, priority=2))
    clock.now += 10 * AGEING_S
    for number in range(100):
        queue.add(make(f"urgent{number}", clock, priority=0))
    admitted = [admit(queue).priority for _ in range(150)]
    last_urgent = max(place for place, priority in enumerate(admitted) if priority == 0)
    assert last_urgent < 100 * AGED_TURN / (AGED_TURN - 1) + 1


def test_a_priority_out_of_range_counts_as_the_nearest() -> None:
    clock = Clock()
    queue = PriorityQueue(clock)
    for name, priority in (("batch", 99), ("high", -5)):
        queue.add(make(name, clock, priority=priority))
    assert [request.request_id for request in queue.candidates(9)] == ["high", "batch"]


def test_admission_again_after_a_preemption_takes_nobodys_turn() -> None:
    clock = Clock()
    queue = PriorityQueue(clock)
    queue.add(make("batch", clock, priority=2))
    clock.now += AGEING_S
    queue.add(make("urgent", clock, priority=0))
    victim = make("victim", clock, priority=0)
    victim.num_preemptions = 1
    for _ in range(AGED_TURN):
        queue.charge(victim, prompt_tokens=5)
    assert queue.candidates(1)[0].request_id == "urgent"


# -- fair ----------------------------------------------------------------------------------------------------------


def service_by_tenant(queue: FairQueue, clock: Clock, admissions: int, output: dict[str, int]) -> dict[str, int]:
    """Admit one by one, charging what each costs; everybody always has something waiting."""
    served = dict.fromkeys(output, 0)
    for number in range(admissions):
        request = admit(queue)
        queue.charge(request, output_tokens=output[request.tenant])
        served[request.tenant] += PROMPT_WEIGHT * request.num_tokens + OUTPUT_WEIGHT * output[request.tenant]
        queue.add(make(f"again{number}", clock, tenant=request.tenant, tokens=request.num_tokens))
    return served


def test_tenants_get_equal_service_whatever_the_size_of_their_requests() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    prompts, output = {"long": 400, "short": 5, "middle": 60}, {"long": 10, "short": 10, "middle": 200}
    for tenant, tokens in prompts.items():
        for number in range(4):
            queue.add(make(f"{tenant}{number}", clock, tenant=tenant, tokens=tokens))
    served = service_by_tenant(queue, clock, 2000, output)
    # Each is served in whole requests, so shares differ by one request at most.
    assert max(served.values()) - min(served.values()) <= 2 * (400 + 2 * 200)


def test_idling_earns_no_credit() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    for number in range(100):
        queue.add(make(f"busy{number}", clock, tenant="busy", tokens=10))
    queue.add(make("early", clock, tenant="idler", tokens=10))
    for _ in range(50):
        admit(queue)
    for number in range(20):
        queue.add(make(f"idler{number}", clock, tenant="idler", tokens=10))
    tenants = [admit(queue).tenant for _ in range(20)]
    assert tenants.count("idler") == 10, "the one that idled is served equally from now on, not first"


def test_a_newcomer_is_not_behind_those_who_were_served_for_long() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    for tenant in ("x", "y"):
        for number in range(100):
            queue.add(make(f"{tenant}{number}", clock, tenant=tenant, tokens=50))
    for _ in range(100):
        admit(queue)
    queue.add(make("new", clock, tenant="new"))
    assert "new" in [request.request_id for request in queue.candidates(3)]


def test_leaving_pays_no_debt() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    for number in range(10):
        queue.add(make(f"other{number}", clock, tenant="other", tokens=10))
    queue.add(make("greedy", clock, tenant="greedy", tokens=10))
    assert {admit(queue).tenant, admit(queue).tenant} == {"other", "greedy"}
    queue.charge(make("running", clock, tenant="greedy"), output_tokens=15)  # it runs, nothing of it waits
    queue.add(make("greedy again", clock, tenant="greedy", tokens=10))
    tenants = [admit(queue).tenant for _ in range(5)]
    assert tenants == ["other"] * 3 + ["greedy", "other"] or tenants == ["other"] * 4 + ["greedy"]


def test_an_empty_queue_lifts_to_the_last_that_left() -> None:
    """Alone on the engine for long, a tenant owes nothing to one that comes later."""
    clock = Clock()
    queue = FairQueue(clock)
    for number in range(50):
        queue.add(make(f"alone{number}", clock, tenant="alone", tokens=100))
        admit(queue)
    for number in range(4):
        queue.add(make(f"late{number}", clock, tenant="late", tokens=100))
        queue.add(make(f"more{number}", clock, tenant="alone", tokens=100))
    assert [admit(queue).tenant for _ in range(4)].count("alone") == 2


def test_priorities_order_a_tenants_own_requests_and_buy_nothing_else() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    for number in range(10):
        queue.add(make(f"urgent{number}", clock, tenant="shouter", priority=0, tokens=10))
        queue.add(make(f"calm{number}", clock, tenant="calm", priority=2 - number % 2, tokens=10))
    admitted = [admit(queue) for _ in range(10)]
    assert [request.tenant for request in admitted].count("calm") == 5
    assert [request.priority for request in admitted if request.tenant == "calm"] == [1] * 5


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    clock = Clock()
    queue = FairQueue(clock)
    for number in range(5000):
        queue.add(make(f"r{number}", clock, tenant=f"t{number}", tokens=3))
        admit(queue)
        queue.charge(make("x", clock, tenant=f"t{number}"), output_tokens=1)
    assert len(queue._tenants) <= MAX_IDLE_TENANTS + 1
    blocked = make("blocked", clock, tenant="first", tokens=3)
    queue.add(blocked)
    for number in range(5000):  # comes and is aborted while the first waits on
        aborted = make(f"a{number}", clock, tenant="toggles")
        queue.add(aborted)
        queue.remove(aborted)
    assert len(queue._heap) < 200
    assert queue.candidates(5) == [blocked]


def waits(policy: SchedulingPolicy, loads: dict[str, float], seconds: float) -> dict[str, list[float]]:
    """Waits by tenant of an engine with 16 seats, at 80 tokens a second each, with requests of 40 output tokens."""
    rng = random.Random(5)
    clock = Clock()
    queue = make_queue(policy, clock)
    arrivals = []
    for tenant, rate in loads.items():
        time = 0.0
        while (time := time + rng.expovariate(rate)) < seconds:
            arrivals.append((time, tenant, rng.randrange(20, 60)))
    arrivals.sort()
    outputs: dict[str, int] = {}
    running: dict[str, tuple[Request, int]] = {}
    waited: dict[str, list[float]] = {tenant: [] for tenant in loads}
    coming = iter(enumerate(arrivals))
    upcoming = next(coming, None)
    while clock.now < seconds:
        while upcoming is not None and upcoming[1][0] <= clock.now:
            number, (time, tenant, output) = upcoming
            request = make(f"r{number}", clock, tenant=tenant, tokens=20)
            request.arrived_at = time
            outputs[request.request_id] = output
            queue.add(request)
            upcoming = next(coming, None)
        while len(running) < 16 and len(queue):
            request = admit(queue)
            waited[request.tenant].append(clock.now - request.arrived_at)
            running[request.request_id] = (request, 0)
        for name, (request, generated) in list(running.items()):
            if generated + 1 == outputs[name]:
                queue.charge(request, output_tokens=outputs[name] % 16)
                del running[name]
            else:
                running[name] = (request, generated + 1)
                if (generated + 1) % 16 == 0:
                    queue.charge(request, output_tokens=16)
        clock.now += 1 / 80
    return waited


def test_a_tenant_with_57_percent_of_the_traffic_does_not_slow_the_rest() -> None:
    """As in the ServeGen trace: 1.25 times the capacity is offered, and one of 21 tenants sends 57 % of it."""
    capacity = 16 * 80 / 40
    offered = 1.25 * capacity
    rest = {f"t{number}": 0.43 * offered / 20 for number in range(20)}

    def of_the_rest(waited: dict[str, list[float]]) -> float:
        values = sorted(value for tenant in rest for value in waited[tenant])
        return values[int(0.99 * len(values))]

    alone = of_the_rest(waits("fair", rest, 60.0))
    fair = waits("fair", {"heavy": 0.57 * offered, **rest}, 60.0)
    fcfs = waits("fcfs", {"heavy": 0.57 * offered, **rest}, 60.0)
    assert of_the_rest(fcfs) > 5.0, "the load must hurt without fairness"
    # Alone the rest waits for nothing; now for a seat to become free, which is one request's time at most.
    assert alone < 0.1
    assert of_the_rest(fair) < 0.5
    served = len(fair["heavy"]) / sum(map(len, fair.values()))
    assert served > 0.4, "what the rest does not want goes to the heavy one"


def test_fcfs_and_backlogs_count_tokens() -> None:
    clock = Clock()
    queue = FcfsQueue()
    requests = [make("same id", clock, tokens=10 + number) for number in range(3)]  # choices of one request
    for request in requests:
        queue.add(request)
    assert queue.remove(requests[1]) and not queue.remove(requests[1])
    assert queue.candidates(5) == [requests[0], requests[2]]
    assert queue.ahead_of(make("new", clock)) == Backlog(2, 22)
    requests[0].output_token_ids = [1, 2, 3]  # a queue that mirrors another hears of it late
    queue.remove(requests[0])
    assert queue.ahead_of(make("new", clock)) == Backlog(1, 12)
