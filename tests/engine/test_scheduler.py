"""What the scheduler promises, one promise a test, on the invented model."""

from __future__ import annotations

import random

import pytest

from pagemill.engine import preemption
from pagemill.engine.admission import Limits, certain_slots, check_request, resolve_max_tokens
from pagemill.engine.errors import RequestError
from pagemill.engine.request import Request, RequestStatus
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import Sampled, SchedulerOutput, StepResult
from tests.engine.invented import Bench, make, twin


def record(bench: Bench) -> list[SchedulerOutput]:
    """Every step's output, kept as the runner sees it."""
    seen: list[SchedulerOutput] = []
    execute = bench.model.execute

    def spy(output: SchedulerOutput) -> StepResult:
        seen.append(output)
        return execute(output)

    bench.model.execute = spy  # type: ignore[method-assign]
    return seen


def test_every_decode_moves_in_every_step_even_with_a_small_budget() -> None:
    bench = Bench(num_blocks=200, block_size=4, max_num_batched_tokens=3)
    steps = record(bench)
    for index in range(8):
        bench.add(make(f"r{index}", [index + 1], 20, ignore_eos=True))
    bench.run()
    for index in range(8):
        at = [n for n, step in enumerate(steps) if f"r{index}" in {i.request.request_id for i in step.scheduled}]
        assert at == list(range(at[0], at[0] + 20)), "a decode was left out of a step"
    assert max(step.num_tokens for step in steps) <= 3


def test_a_long_prompt_does_not_own_a_step() -> None:
    """A short prompt that arrives behind a long one gets its first token while the long one is still prefilling."""
    bench = Bench(num_blocks=400, block_size=4, max_num_batched_tokens=16)
    bench.add(make("long", [1] * 600, 2))
    bench.step()
    bench.add(make("short", [2, 3, 4], 2, ignore_eos=True))
    bench.step()
    assert len(bench.tokens["short"]) == 1
    assert not bench.tokens["long"]
    bench.run()


def test_a_long_prompt_alone_uses_the_whole_budget() -> None:
    bench = Bench(num_blocks=400, block_size=4, max_num_batched_tokens=16)
    steps = record(bench)
    bench.add(make("long", [1] * 64, 1))
    bench.run()
    assert [step.num_tokens for step in steps] == [16, 16, 16, 16]


def test_the_budget_left_by_others_lengthens_the_chunks() -> None:
    """Crowding caps a chunk at half the budget only while somebody can use the other half."""
    bench = Bench(num_blocks=30, block_size=4, max_num_batched_tokens=16)
    steps = record(bench)
    bench.add(make("long", [1] * 64, 1))
    bench.add(make("too large for now", [2] * 100, 1))
    bench.run()
    assert [step.num_tokens for step in steps[:4]] == [16, 16, 16, 16]


def test_requests_that_arrive_together_share_a_prefix_in_one_step() -> None:
    bench = Bench(num_blocks=100, block_size=4, max_num_batched_tokens=64)
    steps = record(bench)
    for index in range(5):
        bench.add(make(f"r{index}", [*range(1, 17), 40 + index], 1))
    bench.step()
    assert len(steps) == 1
    assert steps[0].num_tokens == 17 + 4 * 1
    assert len(bench.ends) == 5


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    bench = Bench(num_blocks=11, block_size=4)
    bench.add(make("running", [1] * 20, 8, ignore_eos=True))
    bench.step()
    bench.add(make("large", [2] * 30, 1))
    bench.add(make("small", [3], 1))
    while "running" not in bench.ends:
        bench.step()
        assert "small" not in bench.ends, "the small request overtook the large one"
    bench.run()


def test_a_decode_does_not_take_what_a_prefill_was_promised() -> None:
    bench = Bench(num_blocks=13, block_size=4, max_num_batched_tokens=5)
    bench.add(make("decoding", [1, 2, 3], 30, ignore_eos=True))
    bench.step()
    long = bench.add(make("prefilling", [5] * 36, 1))
    while "prefilling" not in bench.ends:
        bench.step()
        assert bench.cache.statistics().promised_blocks <= bench.cache.pool.num_free
        assert long.num_preemptions == 0 or long.num_tokens > 36
    bench.run()


def preempting_bench() -> Bench:
    bench = Bench(num_blocks=1 + 12, block_size=2, max_num_batched_tokens=32)
    for index in range(6):
        bench.add(make(f"r{index}", [index + 1, 9], 20, seed=index, ignore_eos=True))
    return bench


def test_preempted_requests_end_with_the_same_tokens_and_a_true_bill() -> None:
    bench = preempting_bench()
    requests = bench.scheduler.requests()
    bench.run()
    for index in range(6):
        assert bench.tokens[f"r{index}"] == twin([index + 1, 9], index, 20, ignore_eos=True)
    statistics = bench.scheduler.statistics()
    assert statistics.preemptions > 0
    assert statistics.preemptions == sum(request.num_preemptions for request in requests)
    assert statistics.recomputed_tokens == sum(request.num_recomputed_tokens for request in requests)
    assert statistics.recomputed_tokens == bench.model.computed_tokens - 6 * 21
    for request in requests:
        metrics = bench.ends[request.request_id].metrics
        assert metrics is not None and metrics.preemptions == request.num_preemptions
        assert (metrics.preempted_ms > 0) == (request.num_preemptions > 0)


def test_nobody_is_preempted_more_often_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit this traffic preempts one request four times."""
    monkeypatch.setattr(preemption, "MAX_PREEMPTIONS", 2)
    rng = random.Random(3)
    bench = Bench(num_blocks=1 + 30, block_size=1, enable_prefix_caching=False)
    requests = [
        bench.add(make(f"r{index}", [index + 1], rng.randint(15, 30), seed=index, ignore_eos=True))
        for index in range(20)
    ]
    bench.run()
    assert max(request.num_preemptions for request in requests) == 2


def test_a_step_that_preempts_admits_nobody() -> None:
    bench = preempting_bench()
    steps = record(bench)
    bench.run()
    preempting = [step for step in steps if step.preempted]
    assert preempting
    seen: set[str] = set()
    for step in steps:
        names = {item.request.request_id for item in step.scheduled}
        if step.preempted:
            assert names <= seen, "a request entered in a step that preempted"
        seen |= names


def test_preempted_go_before_waiting() -> None:
    bench = preempting_bench()
    steps = record(bench)
    late: Request | None = None
    while bench.core.has_requests:
        bench.step()
        if steps[-1].preempted and late is None:
            late = bench.add(make("late", [30], 2, ignore_eos=True))
            waiting = [r for r in bench.scheduler.requests() if r.status is RequestStatus.PREEMPTED]
        if late is not None and late.status is RequestStatus.RUNNING:
            assert all(request.started_at is not None for request in waiting)
            assert not any(r.status is RequestStatus.PREEMPTED for r in bench.scheduler.requests())
            break
    assert late is not None
    bench.run()


def test_a_lone_request_that_outgrows_the_pool_ends_with_what_it_has() -> None:
    bench = Bench(num_blocks=1 + 4, block_size=4)
    bench.add(make("big", [1, 2, 3], 100, ignore_eos=True))
    bench.run()
    end = bench.ends["big"]
    assert end.finish_reason == "length"
    assert bench.tokens["big"] == twin([1, 2, 3], 0, 100, ignore_eos=True)[: 16 - 3 + 1]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_pool_of_one_or_two_blocks_serves_one_after_the_other(blocks: int) -> None:
    bench = Bench(num_blocks=1 + blocks, block_size=4)
    for index in range(5):
        bench.add(make(f"r{index}", [index + 1, 2], 2, seed=index, ignore_eos=True))
    bench.add(make("grows", [1, 2], 50, ignore_eos=True))
    bench.run()
    for index in range(5):
        assert bench.tokens[f"r{index}"] == twin([index + 1, 2], index, 2, ignore_eos=True)
    assert bench.ends["grows"].finish_reason == "length"
    assert bench.tokens["grows"] == twin([1, 2], 0, 50, ignore_eos=True)[: 4 * blocks - 2 + 1]


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted", "finished", "unknown"])
def test_abort_in_every_phase_leaves_nothing(phase: str) -> None:
    bench = Bench(num_blocks=1 + 12, block_size=2, max_num_batched_tokens=4)
    neighbour = twin([7, 7], 1, 12, ignore_eos=True)
    bench.add(make("neighbour", [7, 7], 12, seed=1, ignore_eos=True))
    victim = make("victim", [5] * 9, 6, ignore_eos=True)
    if phase != "unknown":
        bench.add(victim)
    if phase == "prefill":
        while victim.status is not RequestStatus.RUNNING:
            bench.step()
        assert victim.num_computed_tokens < 9
    elif phase == "decode":
        while len(victim.output_token_ids) < 2:
            bench.step()
    elif phase == "preempted":
        while victim.status is not RequestStatus.RUNNING:
            bench.step()
        bench.scheduler._preempt(victim, SchedulerOutput(step=0))
    elif phase == "finished":
        while "victim" not in bench.ends:
            bench.step()
    bench.abort("victim")
    bench.abort("victim")
    bench.core.check()
    if phase not in ("finished", "unknown"):
        assert bench.ends["victim"].finish_reason == "cancelled"
    bench.run()
    assert bench.tokens["neighbour"] == neighbour


def test_abort_matches_whole_ids_only() -> None:
    bench = Bench(num_blocks=50, block_size=4)
    bench.add(make("batch_1", [1], 5, ignore_eos=True))
    bench.add(make("batch_10", [2], 5, ignore_eos=True))
    bench.step()
    bench.abort("batch_1")
    bench.run()
    assert bench.ends["batch_10"].finish_reason == "length"
    assert bench.tokens["batch_10"] == twin([2], 0, 5, ignore_eos=True)


def test_a_resumed_request_goes_on_where_it_was() -> None:
    bench = Bench(num_blocks=50, block_size=4)
    whole = twin([3, 1, 4], 9, 12, ignore_eos=True)
    request = make("r", [3, 1, 4], 12, seed=9, ignore_eos=True)
    request.output_token_ids = whole[:5]
    bench.add(request)
    bench.run()
    assert bench.tokens["r"] == whole


def test_a_resumed_request_that_was_complete_ends_at_once() -> None:
    bench = Bench(num_blocks=50, block_size=4)
    request = make("r", [3], 4, ignore_eos=True)
    request.output_token_ids = twin([3], 0, 4, ignore_eos=True)
    bench.add(request)
    assert bench.ends["r"].finish_reason == "length"
    assert not bench.core.has_requests


def test_a_row_without_usable_logits_ends_that_request_alone() -> None:
    bench = Bench(num_blocks=50, block_size=4)
    execute = bench.model.execute

    def broken(output: SchedulerOutput) -> StepResult:
        rows = [item.request.request_id for item in output.scheduled if item.samples]
        result = execute(output)
        drawn = zip(rows, result.sampled, strict=True)
        result.sampled = [Sampled([-1]) if name == "bad" else sampled for name, sampled in drawn]
        return result

    bench.model.execute = broken  # type: ignore[method-assign]
    bench.add(make("good", [1], 4, ignore_eos=True))
    bench.add(make("bad", [2], 4, ignore_eos=True))
    bench.run()
    error = bench.ends["bad"].error
    assert bench.ends["bad"].finish_reason == "error" and error is not None and error.code == "engine_error"
    assert bench.tokens["good"] == twin([1], 0, 4, ignore_eos=True)


# -- admission -----------------------------------------------------------------------------------------------------

LIMITS = Limits(vocab_size=50, max_model_len=64, block_size=4, num_blocks=10, default_max_tokens=20, max_num_seqs=8)


def request(prompt: int, **params: object) -> Request:
    sampling = SamplingParams.from_mapping(params)
    return Request("r", [1] * prompt, sampling, 0, resolve_max_tokens(prompt, sampling, LIMITS))


@pytest.mark.parametrize(
    ("prompt", "asked", "gets"), [(63, 5, 1), (60, 5, 4), (10, None, 20), (60, None, 4), (10, 50, 50), (1, 10**9, 63)]
)
def test_max_tokens_is_what_the_context_leaves(prompt: int, asked: int | None, gets: int) -> None:
    assert resolve_max_tokens(prompt, SamplingParams(max_tokens=asked), LIMITS) == gets


@pytest.mark.parametrize("prompt", [64, 65, 1000])
def test_a_prompt_without_room_for_a_token_is_refused(prompt: int) -> None:
    with pytest.raises(RequestError) as caught:
        resolve_max_tokens(prompt, SamplingParams(), LIMITS)
    assert caught.value.code == "prompt_too_long" and "63" in caught.value.message


def test_a_prompt_of_the_whole_pool_fits_and_one_more_token_never_does() -> None:
    check_request(request(40, max_tokens=1), LIMITS)
    with pytest.raises(RequestError) as caught:
        check_request(request(41, max_tokens=1), LIMITS)
    assert caught.value.code == "never_fits"
    bench = Bench(num_blocks=11, block_size=4)
    bench.add(make("whole", [1] * 40, 1))
    bench.run()
    assert bench.tokens["whole"] == twin([1] * 40, 0, 1)


def test_a_certain_length_counts_and_a_possible_one_does_not() -> None:
    check_request(request(10, max_tokens=50), LIMITS)
    assert certain_slots(request(10, max_tokens=50)) == 10
    for params in ({"max_tokens": 50, "ignore_eos": True}, {"max_tokens": 50, "min_tokens": 40}):
        with pytest.raises(RequestError) as caught:
            check_request(request(10, **params), LIMITS)
        assert caught.value.code == "never_fits"


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    own = Request("r", [1, bad, 2], SamplingParams(), 0, 4)
    with pytest.raises(RequestError) as caught:
        check_request(own, LIMITS)
    assert caught.value.param == "prompt_token_ids" and str(bad) in caught.value.message


def test_a_preempted_choice_that_fills_the_whole_pool_ends_with_what_it_has() -> None:
    """Its prompt takes every block, and the chunk that recomputes it ends where the pool does."""
    bench = Bench(num_blocks=1 + 3, block_size=8, max_num_batched_tokens=7)
    bench.add(make("r", range(1, 25), 9, n=3, seed=2, ignore_eos=True))
    bench.run()
    for choice in range(3):
        assert bench.choice_ends["r", choice].finish_reason == "length"
        assert bench.choices["r", choice] == twin(range(1, 25), 2, 1, ignore_eos=True, choice=choice)
