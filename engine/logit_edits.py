"""From the rules and states of a step's sequences to the edits of its logits.

Rows whose request has no rules are never looked at, so a batch of plain requests pays one test each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.logits_state import LogitsState
from pagemill.engine.request import Request
from pagemill.kernels.ops import LogitEdits

_T = TypeVar("_T", np.int32, np.float32)


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The rows of one sequence with rules: `first` is that behind its last known token, then one behind each draft."""

    first: int
    request: Request
    rules: LogitRules
    drafts: Sequence[int] = ()


def collect_edits(rows: Sequence[RuledRows], vocab_size: int) -> LogitEdits:
    """The edits of all rows, of logits [R, vocab_size]. Rows come in ascending order."""
    collector = _Collector(vocab_size)
    for ruled in rows:
        request = ruled.request
        output = request.output_token_ids
        state = request.logits_state
        collector.add(ruled.first, request, ruled.rules, output, state)
        for position, draft in enumerate(ruled.drafts, 1):
            if state is not None:
                state = state.fork()
                if not _follows(state, draft):
                    # It will not be accepted, so what stands behind it does not matter.
                    break
            collector.add(ruled.first + position, request, ruled.rules, [*output, *ruled.drafts[:position]], state)
    return collector.edits()


def _follows(state: LogitsState, token_id: int) -> bool:
    if state.matcher is not None and (state.is_complete or not state.matcher.accept(token_id)):
        return False
    if state.counts is not None:
        state.counts.add(token_id)
    return True


class _Collector:
    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._mask_rows: list[int] = []
        self._masks: list[npt.NDArray[np.uint32]] = []
        self._bans: list[tuple[int, npt.NDArray[np.int32]]] = []
        self._biases: list[tuple[int, LogitRules]] = []
        self._penalties: list[tuple[int, Request, LogitsState]] = []

    def add(
        self, row: int, request: Request, rules: LogitRules, output: Sequence[int], state: LogitsState | None
    ) -> None:
        mask = rules.allowed
        if state is not None and state.matcher is not None:
            filled = state.mask(self._words)
            mask = filled if mask is None else filled & mask
        if mask is not None:
            self._mask_rows.append(row)
            self._masks.append(mask)
        if len(rules.ends) and len(output) < request.params.min_tokens:
            self._bans.append((row, rules.ends))
        banned = rules.bad_words.banned_after(request.prompt_token_ids, output)
        if banned or rules.bad_words.always:
            self._bans.append((row, np.array([*rules.bad_words.always, *banned], np.int32)))
        if len(rules.bias_ids):
            self._biases.append((row, rules))
        if state is not None and state.counts is not None:
            self._penalties.append((row, request, state))

    def edits(self) -> LogitEdits:
        counts = [state.counts for _, _, state in self._penalties if state.counts is not None]
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum([len(each.ids) for each in counts], out=starts[1:])
        params = [request.params for _, request, _ in self._penalties]
        return LogitEdits(
            mask_rows=np.array(self._mask_rows, np.int32),
            masks=np.array(self._masks, np.uint32).reshape(-1, self._words),
            ban_rows=_repeated([(row, len(ids)) for row, ids in self._bans]),
            ban_ids=_joined([ids for _, ids in self._bans], np.int32),
            bias_rows=_repeated([(row, len(rules.bias_ids)) for row, rules in self._biases]),
            bias_ids=_joined([rules.bias_ids for _, rules in self._biases], np.int32),
            bias=_joined([rules.bias for _, rules in self._biases], np.float32),
            penalty_rows=np.array([row for row, _, _ in self._penalties], np.int32),
            repetition=np.array([each.repetition_penalty for each in params], np.float32),
            presence=np.array([each.presence_penalty for each in params], np.float32),
            frequency=np.array([each.frequency_penalty for each in params], np.float32),
            starts=starts,
            ids=_joined([each.ids for each in counts], np.int32),
            counts=_joined([each.counts for each in counts], np.int32),
        )


def _repeated(rows: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.repeat(np.array([row for row, _ in rows], np.int32), np.array([count for _, count in rows], np.int64))


def _joined(arrays: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
