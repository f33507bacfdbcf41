"""Structured output of a model that thinks first: its grammar begins where the reasoning ends.

Held to a grammar from its first token, such a model could not think, and answers worse for it. So a gate stands before
the grammar: while the reasoning goes on every token is allowed but an end of the text, which the structure would then
lack. Where the prompt has not begun the reasoning, a text may begin by it or by the structure.

What a token adds behind the closing marker belongs to the structure: white space is nothing, anything else has to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagemill.engine.encoding import encode_inner
from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import Grammar, Mask, Matcher
from pagemill.engine.reasoning import FORMS, ReasoningParserName
from pagemill.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """How one form of reasoning looks in a model's tokens. `path`: those that begin it, none where the prompt has.
    `closers`: what ends it."""

    tokenizer: Tokenizer
    path: tuple[int, ...]
    closers: tuple[bytes, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, parser: ReasoningParserName) -> ReasoningGate:
        form = FORMS[parser]
        opener, closers = next(iter(form.closers.items()))
        path = () if form.begins_inside else tuple(encode_inner(tokenizer.backend, opener, "messages"))
        return cls(tokenizer, path, tuple(closer.encode() for closer in closers))

    def rest(self, tail: bytes) -> bytes | None:
        """What stands behind the first closer in `tail`; None where there is none."""
        found = [(at, closer) for closer in self.closers if (at := tail.find(closer)) >= 0]
        if not found:
            return None
        at, closer = min(found)
        return tail[at + len(closer) :]

    @property
    def longest(self) -> int:
        return max(map(len, self.closers))


@dataclass(frozen=True, slots=True)
class GatedGrammar:
    """A grammar behind a gate; used as the grammar is."""

    grammar: Grammar
    gate: ReasoningGate

    def matcher(self) -> GatedMatcher:
        """A matcher at the beginning of the text."""
        return GatedMatcher(self, self.grammar.matcher())


class GatedMatcher:
    """One sequence's place before, in or behind its reasoning. Used by one thread at a time."""

    __slots__ = ("_at", "_grammar", "_is_open", "_structure", "_tail", "_told")

    def __init__(self, grammar: GatedGrammar, structure: Matcher) -> None:
        self._grammar = grammar
        self._structure = structure
        self._is_open = False  # the reasoning is over, or was left out
        self._at = 0  # tokens of the gate's path so far
        self._told: Matcher | None = structure.fork()  # where the structure is if they belong to it; None: they do not
        self._tail = b""  # the last bytes of the reasoning

    @property
    def is_finished(self) -> bool:
        """True where the text is complete and nothing but its end may follow."""
        return self._is_open and self._structure.is_finished

    @property
    def failure(self) -> RequestError | None:
        """The structure's, see `Matcher`."""
        return self._structure.failure

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False where it may not follow: then this matcher is of no more use."""
        if self._is_open:
            return self._structure.accept(token_id)
        gate, vocabulary = self._grammar.gate, self._grammar.grammar.vocabulary
        if self._at < len(gate.path):
            told, self._told = self._told, None
            if told is not None and told.accept(token_id):
                self._told = told
            if token_id == gate.path[self._at]:
                self._at += 1
                return True
            if self._told is not None:
                self._is_open, self._structure = True, self._told
            return self._is_open
        if token_id in vocabulary.end_ids or not 0 <= token_id < vocabulary.size:
            return False
        self._tail += gate.tokenizer.token_bytes[token_id]
        rest = gate.rest(self._tail)
        self._tail = self._tail[1 - gate.longest :]
        if rest is None:
            return True
        self._is_open = True
        behind = rest.decode(errors="replace")
        ids = encode_inner(gate.tokenizer.backend, behind, "messages") if behind.strip() else []
        return all(self._structure.accept(each) for each in ids)

    def fill(self, mask: Mask) -> None:
        """Write which tokens may follow, all words of `mask`. Raises `failure`."""
        gate = self._grammar.gate
        if self._is_open:
            self._structure.fill(mask)
        elif self._at < len(gate.path):
            if self._told is None:
                mask[:] = 0
            else:
                self._told.fill(mask)
            following = gate.path[self._at]
            mask[following // 32] |= np.uint32(1 << following % 32)
        else:
            mask[:] = ~self._grammar.grammar.vocabulary.only_ends

    def fork(self) -> GatedMatcher:
        """An independent matcher at the same place."""
        fork = GatedMatcher(self._grammar, self._structure.fork())
        fork._is_open, fork._at, fork._tail = self._is_open, self._at, self._tail
        fork._told = None if self._told is None else self._told.fork()
        return fork
