"""Random traffic on tiny pools against the naive twin: whatever the scheduler does, nobody's tokens may change."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.admission import certain_slots
from tests.engine.invented import Bench, make, twin

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


arrivals = st.builds(
    lambda prefix, tail, max_tokens, seed, step, abort_step, in_flight, ignore_eos, resume, salt: Arrival(
        PREFIXES[prefix] + tail, max_tokens, seed, step, abort_step, in_flight, ignore_eos, resume, salt
    ),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(1, 49), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(0, 2),
    st.integers(0, 12),
    st.none() | st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 0, 5]),
    st.sampled_from(["", "", "other"]),
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
            self._bench.abort(name)
            assert self._bench.cache.pool.num_free == free, "a block left the fence while its step was in flight"
        self.pending.clear()
        return sampled


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    traffic=st.lists(arrivals, min_size=1, max_size=14),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    pool_tokens=st.integers(24, 160),
    budget=st.sampled_from([1, 2, 7, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    caching=st.booleans(),
)
def test_tokens_are_the_twins(
    traffic: list[Arrival], block_size: int, pool_tokens: int, budget: int, max_num_seqs: int, caching: bool
) -> None:
    bench = Bench(
        num_blocks=1 + max(2, pool_tokens // block_size),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    aborts = InFlightAborts(bench)
    bench.model.execute = aborts.execute  # type: ignore[method-assign]
    usable = bench.cache.num_usable * block_size
    expected: dict[str, list[int]] = {}
    by_name: dict[str, Arrival] = {}
    last = max(max(a.step, a.abort_step or 0) for a in traffic)
    for step in range(20_000):
        for index, arrival in enumerate(traffic):
            name = f"r{index}"
            if arrival.step == step:
                request = make(
                    name,
                    arrival.prompt,
                    arrival.max_tokens,
                    seed=arrival.seed,
                    ignore_eos=arrival.ignore_eos,
                    salt=arrival.salt,
                )
                text = twin(arrival.prompt, arrival.seed, arrival.max_tokens, ignore_eos=arrival.ignore_eos)
                request.output_token_ids = text[: min(arrival.resume, len(text) - 1)]
                if -(-certain_slots(request) // block_size) <= bench.cache.num_usable:
                    expected[name], by_name[name] = text, arrival
                    bench.add(request)
            if arrival.abort_step == step and name in expected:
                if arrival.abort_in_flight:
                    aborts.pending.append(name)
                else:
                    bench.abort(name)
        bench.step()
        if step > last and not bench.core.has_requests:
            break
    bench.run(1)
    for name, text in expected.items():
        arrival, end, tokens = by_name[name], bench.ends[name], bench.tokens[name]
        assert tokens == text[: len(tokens)]
        if end.finish_reason == "cancelled":
            assert arrival.abort_step is not None
        elif len(tokens) < len(text):
            assert end.finish_reason == "length"
            assert len(arrival.prompt) + len(tokens) >= usable, "it ended early though the pool was larger"
        else:
            assert end.finish_reason == ("stop" if text[-1] == 0 and not arrival.ignore_eos else "length")


@settings(max_examples=60, deadline=None, derandomize=True)
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
