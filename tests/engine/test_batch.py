"""Batches whose arrays are kept from step to step say what the naive twin says, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.batch import BatchBuilder
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import ScheduledSequence, SchedulerOutput, StepResult
from pagemill.engine.speculation import NgramProposer, Speculation
from pagemill.engine.speculation_gain import DraftGain
from tests.engine.invented import Bench, make
from tests.engine.naive_batch import COLUMNS, naive_batch, told
from tests.engine.test_scheduler_properties import NO_SHRINK, Arrival, Conditions, arrivals, conditions, play


class ComparedBatches:
    """A runner that builds each step's batch beside running it, and compares it with the twin's. Counts the steps that
    were built in kept arrays, and those of them that were left to compiled code."""

    def __init__(self, execute: Callable[[SchedulerOutput], StepResult], block_size: int, window: int) -> None:
        self._execute = execute
        self._block_size = block_size
        self._builder = BatchBuilder(block_size=block_size, vocab_size=50, device="cpu", sliding_window=window)
        self.again = 0
        self.left = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        if output.scheduled:
            before = self._builder._decodes
            positions = None if before is None else before._host.positions.tolist()
            batch = self._builder.build(output.scheduled)
            if batch.advance is not None:
                self.left += 1
                assert positions == batch.meta.positions.tolist(), "compiled code would go one token too far"
                batch.advance()
            self.again += before is not None and batch.draw_rows is before._places
            assert told(batch, self._block_size) == _rounded(naive_batch(output.scheduled, self._block_size))
            sampled = sum(item.samples for item in output.scheduled)
            assert batch.num_rows == len(batch.wanted)
            assert batch.sampled is None or [each.item.request for each in batch.sampled] == [
                item.request for item in output.scheduled if item.samples
            ]
            assert batch.sampled is not None or len(batch.draw_rows) == batch.num_rows == sampled
            result = self._execute(output)
            if batch.only_draws:
                self._builder.drawn = [token_id for drawn in result.sampled for token_id in drawn.tokens]
            return result
        return self._execute(output)


def _rounded(expected: dict[str, list[float]]) -> dict[str, list[float]]:
    for name in ("temperature", "top_p", "min_p"):
        expected[name] = np.array(expected[name], np.float32).tolist()
    return expected


def _compared(bench: Bench, block_size: int, window: int = 0) -> ComparedBatches:
    batches = ComparedBatches(bench.model.execute, block_size, window)
    bench.model.execute = batches.execute  # type: ignore[method-assign]
    return batches


@settings(max_examples=80, deadline=None, derandomize=True, phases=NO_SHRINK)
@given(traffic=st.lists(arrivals(), min_size=1, max_size=12), conditions=conditions, drafts=st.booleans())
def test_kept_arrays_are_those_made_from_nothing(traffic: list[Arrival], conditions: Conditions, drafts: bool) -> None:
    """Under preemption, swapping, forks, copies on write, beams, windows, drafts, aborts and resumed requests."""
    speculation = Speculation(3, lambda request: NgramProposer(3, 1), DraftGain(), [0]) if drafts else None
    bench = conditions.bench(speculation)
    _compared(bench, conditions.block_size, conditions.window)
    play(traffic, conditions, bench)


def test_steps_of_the_same_sequences_use_their_arrays_again() -> None:
    bench = Bench(num_blocks=64, block_size=4)
    batches = _compared(bench, 4)
    for number in range(3):
        bench.add(make(f"r{number}", [number, 5, 6], 20 + 10 * number, ignore_eos=True, temperature=0.5, top_k=number))
    bench.run()
    assert batches.again >= 30
    assert batches.left >= 25


def test_one_request_twice_in_a_step_and_others_in_its_place() -> None:
    """Warming up does so: what a place's table is does not follow from the request that stands there."""
    builder = BatchBuilder(block_size=2, vocab_size=50, device="cpu")
    one = Request("a", [1, 2, 3], SamplingParams(), seed=1, max_tokens=9)
    other = Request("b", [4, 5, 6], SamplingParams(top_k=3), seed=2, max_tokens=9)
    steps = [
        [(one, [1, 2]), (other, [3, 4]), (one, [5, 6])],
        [(one, [1, 2]), (one, [5, 6])],
        [(other, [3, 4])],
        [(other, [3, *range(10, 50)])],
        [(other, [9, 10]), (one, [1, 2])],
    ]
    for step in steps:
        scheduled = [ScheduledSequence(request, 2, 1, table, True) for request, table in step]
        assert told(builder.build(scheduled), 2) == _rounded(naive_batch(scheduled, 2))
    assert set(COLUMNS) == set(builder.build(scheduled).sampling.__dataclass_fields__)


def test_a_block_that_is_copied_or_added_between_two_steps_of_the_same_sequences() -> None:
    builder = BatchBuilder(block_size=2, vocab_size=50, device="cpu")
    one = Request("a", [1, 2], SamplingParams(), seed=1, max_tokens=9)
    other = Request("b", [4, 5], SamplingParams(), seed=2, max_tokens=9)
    tables = [[1, 2], [3, 4]]
    for start, changed in (
        (2, tables),
        (3, [[1, 2], [3, 9]]),
        (4, [[1, 2, 5], [3, 9, 8]]),
        (5, [[1, 2, 7, 6], [3, 9, 8]]),
    ):
        for table, new in zip(tables, changed, strict=True):
            table[:] = new
        for request in (one, other):
            request.output_token_ids.append(start)
        scheduled = [
            ScheduledSequence(one, start, 1, tables[0], True),
            ScheduledSequence(other, start, 1, tables[1], True),
        ]
        batch = builder.build(scheduled)
        assert (batch.advance is None) == (start == 2)
        if batch.advance is not None:
            batch.advance()
        assert told(batch, 2) == _rounded(naive_batch(scheduled, 2))
        builder.drawn = [start + 1, start + 1]
