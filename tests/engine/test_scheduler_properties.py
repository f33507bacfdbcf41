"""Random traffic on tiny pools against the naive twin: whatever the scheduler does, nobody's tokens may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagemill.engine.admission import certain_slots
from pagemill.engine.config import PreemptionMode
from pagemill.engine.policy import SchedulingPolicy
from pagemill.engine.request import Request
from pagemill.engine.speculation import Speculation
from tests.engine.invented import Bench, beam_twin, make, twin

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a whole traffic takes minutes
PREFIXES = [[], [7] * 9, list(range(1, 33)), [*list(range(1, 17)), 40, 41, 42]]


@dataclass
class Arrival:
    prompt: list[int]
    max_tokens: int
    seed: int
    step: int
    abort_step: int | None
    abort_in_flight: bool
    ignore_eos: bool
    resume: int
    salt: str
    tenant: str
    priority: int
    n: int
    beams: int
    penalty: float
    early: bool | Literal["never"]

    def request(self, name: str) -> Request:
        search = {"beam_width": self.beams, "length_penalty": self.penalty, "early_stopping": self.early}
        return make(
            name,
            self.prompt,
            self.max_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            salt=self.salt,
            tenant=self.tenant,
            priority=self.priority,
            n=self.n,
            **(search if self.beams > 1 else {}),
        )

    def texts(self, window: int) -> list[list[int]]:
        """What each choice should say."""
        if self.beams > 1:
            return beam_twin(self.prompt, self.beams, self.n, self.max_tokens, self.penalty, self.early)
        return [
            twin(self.prompt, self.seed, self.max_tokens, ignore_eos=self.ignore_eos, choice=choice, window=window)
            for choice in range(self.n)
        ]

    def told(self, texts: list[list[int]]) -> list[list[int]]:
        """What another engine is to have told already."""
        if not self.resume or self.beams > 1:
            return []
        return [text[: min(self.resume + choice, len(text) - (choice == 0))] for choice, text in enumerate(texts)]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    kind = draw(st.sampled_from(["one", "one", "one", "choices", "beams"]))
    n = 1 if kind == "one" else draw(st.integers(1, 3))
    beams = draw(st.integers(n, 4)) if kind == "beams" else 1
    return Arrival(
        prompt=draw(st.sampled_from(PREFIXES)) + draw(st.lists(st.integers(1, 49), min_size=1, max_size=20)),
        max_tokens=draw(st.integers(1, 40 if beams == 1 else 12)),
        seed=draw(st.integers(0, 2)),
        step=draw(st.integers(0, 12)),
        abort_step=draw(st.none() | st.integers(0, 40)),
        abort_in_flight=draw(st.booleans()),
        ignore_eos=draw(st.booleans()) and beams == 1,
        resume=draw(st.sampled_from([0, 0, 0, 5])),
        salt=draw(st.sampled_from(["", "", "other"])),
        tenant=draw(st.sampled_from(["a", "b"])),
        priority=draw(st.integers(0, 2)),
        n=n,
        beams=beams,
        penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
        early=draw(st.sampled_from([True, False, "never"])),
    )


class InFlightAborts:
    """Aborts that fall between a step's scheduling and its commit: the runner calls them while it computes."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._execute = bench.model.execute
        self.pending: list[str] = []

    def execute(self, output):  # type: ignore[no-untyped-def]
        sampled = self._execute(output)
        for name in self.pending:
            free = self._bench.cache.pool.num_free
            self._bench.abort_in_flight(name)
            assert self._bench.cache.pool.num_free == free, "a block left the fence while its step was in flight"
        self.pending.clear()
        return sampled


@dataclass
class Conditions:
    """What the traffic meets. `pool_tokens` and `host_tokens`: sizes in tokens."""

    block_size: int
    pool_tokens: int
    budget: int
    max_num_seqs: int
    caching: bool
    host_tokens: int
    mode: PreemptionMode
    reserve: bool
    window: int
    policy: SchedulingPolicy
    forecast: bool

    def bench(self, speculation: Speculation | None = None) -> Bench:
        return Bench(
            num_blocks=1 + max(2, self.pool_tokens // self.block_size),
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.caching,
            num_host_blocks=self.host_tokens // self.block_size,
            preemption_mode=self.mode,
            reserve=self.reserve,
            sliding_window=self.window,
            policy=self.policy,
            forecast=self.forecast,
            speculation=speculation,
        )


conditions = st.builds(
    Conditions,
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    pool_tokens=st.integers(24, 200),
    budget=st.sampled_from([4, 7, 16, 64]),
    max_num_seqs=st.sampled_from([4, 6, 64]),
    caching=st.booleans(),
    host_tokens=st.sampled_from([0, 20, 400]),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    reserve=st.sampled_from([False, False, True]),
    window=st.sampled_from([0, 0, 11]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    forecast=st.booleans(),
)


@settings(max_examples=400, deadline=None, derandomize=True, phases=NO_SHRINK)
@given(traffic=st.lists(arrivals(), min_size=1, max_size=12), conditions=conditions)
def test_tokens_are_the_twins(traffic: list[Arrival], conditions: Conditions) -> None:
    play(traffic, conditions, conditions.bench())


def play(traffic: list[Arrival], conditions: Conditions, bench: Bench) -> None:
    """Run the traffic to its end, with `check` after each step, and compare every token with the twin's."""
    block_size, reserve, window = conditions.block_size, conditions.reserve, conditions.window
    aborts = InFlightAborts(bench)
    bench.model.execute = aborts.execute  # type: ignore[method-assign]
    usable = bench.cache.num_usable * block_size
    expected: dict[str, list[list[int]]] = {}
    by_name: dict[str, Arrival] = {}
    last = max(max(a.step, a.abort_step or 0) for a in traffic)
    for step in range(20_000):
        for index, arrival in enumerate(traffic):
            name = f"r{index}"
            if arrival.step == step and not (window and arrival.beams > 1):
                request, texts = arrival.request(name), arrival.texts(window)
                if -(-certain_slots(request) // block_size) <= bench.cache.num_usable:
                    expected[name], by_name[name] = texts, arrival
                    bench.add(request, arrival.told(texts))
            if arrival.abort_step == step and name in expected:
                if arrival.abort_in_flight:
                    aborts.pending.append(name)
                else:
                    bench.abort(name)
        bench.step()
        if step > last and not bench.core.has_requests:
            break
    bench.run(1)
    if reserve or conditions.mode == "recompute" or conditions.host_tokens == 0:
        assert bench.scheduler.statistics().swapped_blocks == 0
    if reserve:
        assert bench.scheduler.statistics().preemptions == 0
    for name, texts in expected.items():
        arrival = by_name[name]
        if bench.ends[name].finish_reason == "cancelled":
            assert arrival.abort_step is not None
        for choice, text in enumerate(texts):
            end, tokens = bench.choice_ends.get((name, choice)), bench.choices[name, choice]
            if arrival.beams > 1 and tokens != text:
                # Told whole or not at all, and cut short only where the pool could not hold all beams.
                each = -(-arrival.max_tokens // block_size) + 1
                whole = -(-len(arrival.prompt) // block_size) + arrival.beams * each
                assert not tokens or whole > bench.cache.num_usable
                continue
            assert tokens == text[: len(tokens)]
            if end is None or end.finish_reason == "cancelled":
                assert arrival.abort_step is not None
            elif len(tokens) < len(text):
                assert end.finish_reason == "length"
                assert len(arrival.prompt) + len(tokens) >= usable or reserve, "it ended early in a larger pool"
            else:
                ended = text[-1] == 0 and not arrival.ignore_eos
                assert end.finish_reason == ("stop" if ended else "length")


@settings(max_examples=60, deadline=None, derandomize=True, phases=NO_SHRINK)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.sampled_from([3, 16, 64]),
)
def test_together_a_shared_prefix_is_computed_once(prompts: list[int], block_size: int, budget: int) -> None:
    """Requests submitted at once behind one prefix: no full block of it is computed twice."""
    prefix = list(range(1, 49))
    bench = Bench(num_blocks=2000, block_size=block_size, max_num_batched_tokens=budget)
    for index, token in enumerate(prompts):
        bench.add(make(f"r{index}", [*prefix, token, index % 50], 3, ignore_eos=True))
    bench.run()
    shared = len(prefix) // block_size * block_size
    own = sum(len(prefix) + 2 - shared + 2 for _ in prompts)
    assert bench.model.computed_tokens <= shared + own
    for index, token in enumerate(prompts):
        assert bench.tokens[f"r{index}"] == twin([*prefix, token, index % 50], 0, 3, ignore_eos=True)
