"""What a request's parameters say about its logits, worked out once: the part that does not change with its tokens.

`SamplingParams` has text and pairs as callers write them; here they are arrays over the model's vocabulary, ready to
become a step's `LogitEdits`. What does change with the tokens is `LogitsState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagemill.engine.logits_state import BadWords, LogitsState
from pagemill.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagemill.engine.grammar import Grammar
    from pagemill.engine.reasoning_gate import GatedGrammar

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of one request, shared by its sequences.

    allowed: uint32 [ceil(V / 32)], the tokens that may be sampled at all; None: every one. bias_ids int32 and bias
    float32 [N]. ends int32: what would end the sequence, banned until it has min_tokens tokens.
    """

    allowed: npt.NDArray[np.uint32] | None
    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    ends: Ids
    bad_words: BadWords
    counted: bool
    grammar: Grammar | GatedGrammar | None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bad_sequences: Sequence[tuple[int, ...]] = (),
        grammar: Grammar | GatedGrammar | None = None,
    ) -> LogitRules | None:
        """The rules of checked parameters; None where every logit stays as the model made it."""
        ends = (
            {*(() if params.ignore_eos else eos_token_ids), *(params.stop_token_ids or ())} if params.min_tokens else ()
        )
        rules = cls(
            None if params.allowed_token_ids is None else token_mask(params.allowed_token_ids, vocab_size),
            np.array([token_id for token_id, _ in params.biases], np.int32),
            np.array([bias for _, bias in params.biases], np.float32),
            np.array(sorted(token_id for token_id in ends if token_id < vocab_size), np.int32),
            BadWords.of(bad_sequences),
            params.has_penalties,
            grammar,
        )
        nothing = not (len(rules.bias_ids) or len(rules.ends) or bad_sequences or rules.counted)
        return None if nothing and rules.allowed is None and grammar is None else rules

    def begin(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> LogitsState | None:
        """The state of a sequence with these tokens; None where the rules need none. Raises as `LogitsState` does."""
        return LogitsState.begin(prompt_token_ids, output_token_ids, counted=self.counted, grammar=self.grammar)


def token_mask(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """uint32 [ceil(vocab_size / 32)] with the bits of `token_ids` set."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask
