"""Structured output: which tokens may follow, so that a text is what its `StructuredOutputs` says.

The work is done by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of regular
expression derivatives, walked along a trie of the vocabulary. Nothing is computed ahead for the whole vocabulary, so a
grammar compiles in about a millisecond, and a mask costs some tens of microseconds.

Rules that everything here keeps:

* Tokens are bytes, the same ones that the detokeniser writes (`TokenBytes`), so what the grammar accepts is what the
  caller reads. Special tokens and unused rows of a padded vocabulary have no bytes and are never allowed.
* The end of the text is not part of the grammar: all end-of-sequence ids are allowed exactly where the text is
  complete.
* A matcher's state is a function of the tokens that it accepted, so a request that moves to another engine goes on
  from its tokens.
* A request's grammar can fail its request only: what cannot be built is refused when it is compiled, and every step of
  the parser is bounded.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint32]
"""[ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set where token t is allowed."""

_CACHED_GRAMMARS = 256
_MESSAGE_LENGTH = 300
_WHITESPACE = r"( |\r?\n[ \t]{0,40})"
# The parser would allow only one tokenisation of text that is certain; the model's own may be another.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles and keeps the grammars of one model. Safe to use from several threads.

    `vocab_size` is the model's number of logits, V. The first `compile` takes some 0.2 s for the vocabulary's trie.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

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
            self._kept[spec] = grammar
            if len(self._kept) > _CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar


class Grammar:
    """A compiled grammar. Immutable; shared by all sequences of the requests that ask for it."""

    def __init__(self, vocabulary: _Vocabulary, spec: StructuredOutputs) -> None:
        self._vocabulary = vocabulary
        self._label = _Label(spec.place, spec.param)
        try:
            source = _OPTIONS + _start(spec)
        except (GbnfToLarkError, ValueError, RecursionError) as error:
            raise self._label.refuse(str(error)) from error
        self._first = llguidance.LLMatcher(vocabulary.trie, source, log_level=0, limits=vocabulary.limits)
        if self._first.is_error():
            raise self._label.refuse(self._first.get_error())
        # The lexer is lazy: with the first mask it shows that a grammar is too large, or matches nothing.
        self.matcher().fill(vocabulary.mask())

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""
        return Matcher(self._vocabulary, self._first.deep_copy(), self._label)


class Matcher:
    """One sequence's place in its grammar. Used by one thread at a time."""

    __slots__ = ("_ends", "_label", "_parser", "_vocabulary")

    def __init__(self, vocabulary: _Vocabulary, parser: llguidance.LLMatcher, label: _Label, ends: int = 0) -> None:
        self._vocabulary = vocabulary
        self._parser = parser
        self._label = label
        self._ends = ends  # accepted end-of-sequence ids, of which the parser knows nothing

    @property
    def is_complete(self) -> bool:
        """True where the text may end here."""
        return self._parser.is_accepting()

    @property
    def is_finished(self) -> bool:
        """True where the text is complete and nothing but its end may follow."""
        return self._ends > 0 or (self._parser.is_stopped() and not self._parser.is_error())

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False, and nothing has changed, where the grammar does not allow it.

        Raises `invalid_request` where the parser gave up; the matcher is of no more use then.
        """
        if token_id in self._vocabulary.end_ids:
            if not self.is_complete:
                return False
            self._ends += 1
            return True
        if self._ends or not 0 <= token_id < self._vocabulary.size:
            return False
        accepted: bool = self._parser.try_consume_tokens([token_id]) == 1
        if not accepted and self._parser.is_error():
            raise self._label.refuse(self._parser.get_error())
        return accepted

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends and not self._parser.rollback(count - ends):
            raise self._label.refuse(self._parser.get_error())

    def fill(self, mask: Mask) -> None:
        """Write which tokens may follow, all words of `mask`.

        Raises `invalid_request` where no token can follow, or the parser gave up on a grammar that is too ambiguous.
        """
        if self._ends:
            mask[:] = self._vocabulary.only_ends
            return
        words = self._vocabulary.words
        self._parser.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * words)
        mask[words:] = 0
        if self._parser.is_error():
            raise self._label.refuse(self._parser.get_error())

    def fork(self) -> Matcher:
        """An independent matcher at the same place."""
        return Matcher(self._vocabulary, self._parser.deep_copy(), self._label, self._ends)


class _Label:
    """How errors about one grammar are written."""

    __slots__ = ("param", "place")

    def __init__(self, place: str, param: str) -> None:
        self.place = place
        self.param = param

    def refuse(self, reason: str) -> RequestError:
        return invalid(f"{self.place} cannot be used: {_readable(reason)}", self.param)


class _Vocabulary:
    """The vocabulary as llguidance wants it: the bytes of each token, in a trie."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.limits = llguidance.LLParserLimits(verbose_errors=False)
        pieces = tokenizer.token_bytes
        known = 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
        self.size = min(known, vocab_size)
        ends = sorted({token_id for token_id in eos_token_ids if 0 <= token_id < self.size})
        self.end_ids = frozenset(ends)
        tokens = [
            b"" if token_id in self.end_ids or pieces.is_special(token_id) else pieces[token_id]
            for token_id in range(self.size)
        ]
        self.words = (self.size + 31) // 32
        self.only_ends = np.zeros((vocab_size + 31) // 32, np.uint32)
        for token_id in ends:
            self.only_ends[token_id // 32] |= np.uint32(1 << (token_id % 32))
        self.trie = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Source(tokens, ends[0], tokenizer)), eos_token=ends
        )

    def mask(self) -> Mask:
        return np.empty_like(self.only_ends)


class _Source:
    """What llguidance's wrapper reads a tokenizer from."""

    def __init__(self, tokens: list[bytes], eos_token_id: int, tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self._backend = tokenizer.backend

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


def _start(spec: StructuredOutputs) -> str:
    """`spec` as a grammar in llguidance's dialect of Lark."""
    if spec.grammar is not None:
        return any_to_lark(spec.grammar)
    if spec.regex is not None:
        return f"start: /{llguidance.regex_to_lark(spec.regex)}/"
    if spec.choice is not None:
        return "start: " + " | ".join(map(json.dumps, spec.choice))
    schema: Any = {"type": "object"} if spec.json is None else json.loads(str(spec.json))
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if spec.disable_any_whitespace:
        spaces: dict[str, Any] = {"whitespace_flexible": False}
    else:
        spaces = {"whitespace_pattern": spec.whitespace_pattern or _WHITESPACE}
    return f"start: %json {json.dumps({**schema, 'x-guidance': spaces})}"


def _readable(reason: str) -> str:
    """The part of a library's message that says something to a caller."""
    text = " ".join(reason.partition("<backtrace>")[0].partition("<state>")[0].split())
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}..."
