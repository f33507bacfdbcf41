"""Structured output: which tokens may follow, so that a text is what its `StructuredOutputs` says.

The work is done by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of regular
expression derivatives, walked along a trie of the vocabulary. It was measured against xgrammar, see
`docs/structured_output.md`. It won because it refuses a schema that it cannot keep, where xgrammar goes on with half of
it; it computes nothing ahead for the whole vocabulary, so a grammar is ready in milliseconds; and it needs no other
package.

What everything here keeps to:

* Tokens are bytes, the same ones that the detokeniser writes (`TokenBytes`), so what the grammar accepts is what the
  caller reads. Special tokens and unused rows of a padded vocabulary have no bytes and are never allowed.
* The end of the text is not part of the grammar: all end-of-sequence ids are allowed exactly where the text is
  complete. The parser knows none of them, only an end of its own behind the vocabulary.
* A matcher's state is a function of the tokens that it accepted, so a request that moves to another engine goes on
  from its tokens.
* A request's grammar can fail its request only. It is compiled in a helper process first (`GrammarTrial`), which may
  take too long or die; and each step of the parser is bounded.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.grammar_helper import compile_first, make_trie
from pagemill.engine.grammar_source import source_of
from pagemill.engine.grammar_trial import GrammarTrial
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint32]
"""[ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set where token t is allowed."""

LIMITS: dict[str, Any] = {
    "verbose_errors": False,
    "max_items_in_row": 400,  # a step in a grammar that is ambiguous everywhere takes this number squared
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,  # of about 1 kB, in each grammar
}
_MAX_GRAMMARS = 64
_MAX_SOURCE = 1 << 20  # characters of all cached grammars; what is compiled takes a hundred times as much
_MAX_TOKEN_BYTES = 512  # the trie has no room for tokens of some thousand
_MESSAGE_LENGTH = 300
_PREFIX = re.compile(r"^(at \d+\(\d+\): )?failed to compile JSON schema: |^at 1\(8\): |^failed to parse \"%json\": ")
_PHRASES = (
    ("Unimplemented keys", "these keywords are not supported"),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf is supported only where it is plain that no value fits two of its schemas; use anyOf",
    ),
    ("NoExtensionBias", "no token of this model can go on"),
    ("NoExtension", "no token of this model can go on"),
)


class GrammarCompiler:
    """Compiles and keeps the grammars of one model. Safe to use from several threads.

    `vocab_size` is the model's number of logits, V. The first `compile` makes the vocabulary's trie and starts the
    helper process, which takes some tenths of a second.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._kept_source = 0

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of `spec`, from the cache where it is known. Raises `invalid_request` where none can be built."""
        with self._lock:
            kept = self._kept.get(spec)
            if kept is not None:
                self._kept.move_to_end(spec)
                return kept
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            vocabulary = self._vocabulary
        grammar = Grammar(vocabulary, spec)
        with self._lock:
            if spec not in self._kept:
                self._kept[spec] = grammar
                self._kept_source += grammar.size
            while len(self._kept) > _MAX_GRAMMARS or self._kept_source > _MAX_SOURCE:
                _, dropped = self._kept.popitem(last=False)
                self._kept_source -= dropped.size
        return grammar


class Grammar:
    """A compiled grammar, shared by all sequences of the requests that ask for it. `size`: of its source.

    All its parsers share one lexer, which keeps the states that it has met, up to a limit. Past it they all fail, and
    go on from a new lexer.
    """

    def __init__(self, vocabulary: _Vocabulary, spec: StructuredOutputs) -> None:
        self.vocabulary = vocabulary
        self._place, self._param = spec.place, spec.param
        try:
            self._source = source_of(spec, vocabulary.trial.convert)
            if spec.choice is None and not spec.json_object:
                vocabulary.trial.run(self._source)
            self._first = self._compile()
        except ValueError as error:
            raise self.refusal(str(error)) from error
        self.size = len(self._source)
        self._lock = threading.Lock()
        self._generation = 0

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""
        return Matcher(self, *self.parser(after=-1))

    def parser(self, after: int) -> tuple[llguidance.LLMatcher, int]:
        """A parser at the beginning of the text, of a lexer younger than `after`, and that lexer's generation."""
        with self._lock:
            if self._generation <= after:
                self._first = self._compile()
                self._generation += 1
            return self._first.deep_copy(), self._generation

    def refusal(self, reason: str) -> RequestError:
        """The error of a request that this grammar fails."""
        return invalid(f"{self._place} cannot be used: {_readable(reason)}", self._param)

    def _compile(self) -> llguidance.LLMatcher:
        return compile_first(self.vocabulary.trie, self._source, self.vocabulary.limits)


class Matcher:
    """One sequence's place in its grammar. Used by one thread at a time."""

    __slots__ = ("_ends", "_failure", "_generation", "_grammar", "_parser", "_tokens")

    def __init__(self, grammar: Grammar, parser: llguidance.LLMatcher, generation: int) -> None:
        self._grammar = grammar
        self._parser = parser
        self._generation = generation
        self._tokens: list[int] = []
        self._ends = 0  # accepted end-of-sequence ids, of which the parser knows nothing
        self._failure: RequestError | None = None

    @property
    def is_complete(self) -> bool:
        """True where the text may end here."""
        return self._parser.is_accepting()

    @property
    def is_finished(self) -> bool:
        """True where the text is complete and nothing but its end may follow."""
        return self._ends > 0 or (self._parser.is_stopped() and not self._parser.is_error())

    @property
    def failure(self) -> RequestError | None:
        """An `invalid_request` error once the parser has given up, because no token of the model can follow or the
        grammar is too ambiguous. The matcher is of no more use then."""
        return self._failure

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False where the grammar does not allow it, and nothing has changed; or on failure."""
        vocabulary = self._grammar.vocabulary
        if token_id in vocabulary.end_ids:
            if not self.is_complete:
                return False
            self._ends += 1
            return True
        if self._ends or not 0 <= token_id < vocabulary.size:
            return False
        accepted = self._parser.try_consume_tokens([token_id])
        if not accepted and self._parser.is_error() and self._renew():
            accepted = self._parser.try_consume_tokens([token_id])
            self._check()
        if accepted:
            self._tokens.append(token_id)
        return accepted == 1

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            del self._tokens[ends - count :]
            self._parser.rollback(count - ends)

    def fill(self, mask: Mask) -> None:
        """Write which tokens may follow, all words of `mask`. Raises `failure`."""
        vocabulary = self._grammar.vocabulary
        if self._ends:
            mask[:] = vocabulary.only_ends
            return
        own = np.empty(vocabulary.words, np.uint32)
        self._parser.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if self._parser.is_error() and self._renew():
            self._parser.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            self._check()
        if self._failure is not None:
            raise self._failure
        count = min(len(own), len(mask))
        mask[:count] = own[:count]
        mask[count:] = 0
        word, bit = vocabulary.size // 32, np.uint32(1 << vocabulary.size % 32)
        if own[word] & bit:  # the parser's own end
            if word < count:
                mask[word] &= ~bit
            mask |= vocabulary.only_ends

    def fork(self) -> Matcher:
        """An independent matcher at the same place."""
        fork = Matcher(self._grammar, self._parser.deep_copy(), self._generation)
        fork._tokens, fork._ends, fork._failure = self._tokens.copy(), self._ends, self._failure
        return fork

    def _renew(self) -> bool:
        """After an error, put a parser with a new lexer in place. False where that fails too."""
        if self._failure is None:
            self._parser, self._generation = self._grammar.parser(after=self._generation)
            self._parser.try_consume_tokens(self._tokens)
            self._check()
        return self._failure is None

    def _check(self) -> None:
        if self._parser.is_error():
            self._failure = self._grammar.refusal(self._parser.get_error())


class _Vocabulary:
    """The model's vocabulary as the parser wants it, and what is shared by all grammars over it.

    `size`: the first id behind the tokens, which is the parser's end. `words`: of the parser's masks.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        pieces = tokenizer.token_bytes
        known = 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.size = min(known, vocab_size)
        self.end_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self.only_ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in self.end_ids:
            self.only_ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        tokens = [
            b"" if token_id in self.end_ids or pieces.is_special(token_id) else pieces[token_id]
            for token_id in range(self.size)
        ]
        tokens = [token if len(token) <= _MAX_TOKEN_BYTES else b"" for token in tokens]
        tokens.append(b"")
        self.words = -(-len(tokens) // 32)
        self.trie = make_trie(tokens, self.size)
        self.limits = llguidance.LLParserLimits(**LIMITS)
        self.trial = GrammarTrial(tokens, self.size, LIMITS)


def _readable(reason: str) -> str:
    """The part of a library's message that says something to a caller."""
    text = reason
    for tail in ("<backtrace>", "<state>", "<non-verbose/>", "\n   1 | "):
        text = text.partition(tail)[0]
    text = " ".join(_PREFIX.sub("", text).split())
    for theirs, ours in _PHRASES:
        text = text.replace(theirs, ours)
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}..."
