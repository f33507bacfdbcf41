"""Random JSON schemas, and a random writer that follows a matcher's masks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pagemill.engine.grammar import Matcher
from pagemill.engine.tokenizer import Tokenizer

Schema = dict[str, Any] | bool

_NAMES = ("id", "name", "größe", "a b", 'q"uote', "back\\slash", "x/y", "~t", "日本", "", "ok", "n1", "tags", "next")
_PATTERNS = (
    "^[a-z]{1,8}$",
    "^\\d{3}-\\d{4}$",
    "[A-F0-9]+",
    "^(yes|no)$",
    "b",
    "^.{2,5}$",
    "^\\w+\\s\\w+$",
    "^[^\\n]*$",
)
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email", "hostname", "ipv6", "duration")
_WORDS = ("red", "green", 'b"lue', "tab\there", "é", "🌶️", "", "null", "12", "a\\b", "new\nline", "</s>", "<|im_end|>")


class SchemaMaker:
    """Makes schemas that mostly can be satisfied. The same `rng` makes the same schemas."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def make(self) -> Schema:
        """A whole schema, with the $defs that it refers to."""
        rng = self._rng
        self._defs = {}
        if rng.random() < 0.3:
            names = ["node", "Leaf", "a/b"][: rng.randint(1, 3)]
            self._defs = dict.fromkeys(names, True)
            for name in names:
                # Only through objects may definitions refer to each other, so that none is but itself.
                maker = self._object if name == "node" else rng.choice([self._string, self._integer, self._enum])
                self._defs[name] = maker(1)
        schema = self._schema(0)
        if self._defs and isinstance(schema, dict):
            schema = {**schema, "$defs": self._defs}
        return schema

    def _schema(self, depth: int) -> Schema:
        rng = self._rng
        makers = [self._string, self._integer, self._number, self._enum, self._const, self._scalar]
        if depth < 4:
            makers += [self._object, self._object, self._array, self._any_of, self._nullable, self._all_of]
        if depth == 0:
            makers = [self._object, self._object, self._array, self._any_of, self._string, self._integer, self._all_of]
        if self._defs and depth > 0:
            makers += [self._ref] * 3
        schema = rng.choice(makers)(depth + 1)
        if isinstance(schema, dict) and rng.random() < 0.2:
            schema = {"title": "T", "description": 'any "text"', **schema, "default": None, "examples": [1]}
        return schema

    def _scalar(self, depth: int) -> Schema:
        return self._rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"type": "number"}])

    def _string(self, depth: int) -> Schema:
        rng = self._rng
        schema: dict[str, Any] = {"type": "string"}
        kind = rng.randrange(4)
        if kind == 0:
            schema["pattern"] = rng.choice(_PATTERNS)
        elif kind == 1:
            schema["format"] = rng.choice(_FORMATS)
        elif kind == 2:
            low = rng.randint(0, 6)
            schema |= {"minLength": low, "maxLength": low + rng.randint(0, 20)}
        return schema

    def _bounds(self, scale: int, kind: type[int] | type[float]) -> dict[str, Any]:
        rng = self._rng
        low = kind(rng.uniform(-scale, scale))
        high = low + kind(rng.uniform(1, scale))
        bounds: dict[str, Any] = {}
        if rng.random() < 0.6:
            bounds[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.6:
            bounds[rng.choice(["maximum", "exclusiveMaximum"])] = high + 2
        return bounds

    def _integer(self, depth: int) -> Schema:
        rng = self._rng
        schema = {"type": "integer", **self._bounds(rng.choice([3, 150, 10**6, 2**40, 2**52]), int)}
        if rng.random() < 0.15:
            return {"type": "integer", "multipleOf": rng.choice([2, 5, 10, 7])}
        return schema

    def _number(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.15:
            return {"type": "number", "multipleOf": rng.choice([0.5, 0.25, 2, 10])}
        return {"type": "number", **self._bounds(rng.choice([1, 1, 100, 10**6]), rng.choice([int, float]))}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        kind = rng.randrange(8 if depth < 3 else 6)
        if kind == 0:
            return rng.choice([None, True, False])
        if kind == 1:
            return rng.choice([0, -1, 7, 2**53, -(2**31), 10**15])
        if kind == 2:
            return rng.choice([0.5, -2.25, 1e-3, 12.5])
        if kind == 6:
            return [self._value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 7:
            return {rng.choice(_NAMES): self._value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice(_WORDS)

    def _enum(self, depth: int) -> Schema:
        return {"enum": [self._value(1) for _ in range(self._rng.randint(1, 6))]}

    def _const(self, depth: int) -> Schema:
        return {"const": self._value(0)}

    def _nullable(self, depth: int) -> Schema:
        kinds = self._rng.sample(["string", "integer", "boolean", "number", "array", "object"], 2)
        return {"type": [*kinds, "null"]}

    def _ref(self, depth: int) -> Schema:
        name = self._rng.choice(list(self._defs))
        return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.9:
            schema["items"] = self._schema(depth)
        if rng.random() < 0.2:
            schema["prefixItems"] = [self._schema(depth) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.4:
            schema["minItems"] = rng.randint(0, 2)
        if rng.random() < 0.5:
            schema["maxItems"] = rng.randint(2, 5)
        return schema

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._schema(depth) for name in names}}
        if "next" in names and "node" in self._defs:
            schema["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        required = [name for name in names if rng.random() < 0.6]
        if required or rng.random() < 0.2:
            schema["required"] = required
        choice = rng.random()
        if choice < 0.6:
            schema["additionalProperties"] = False
        elif choice < 0.75:
            schema["additionalProperties"] = self._schema(max(depth, 3))
        elif choice < 0.85:
            schema["patternProperties"] = {"^p_[a-z]+$": self._schema(max(depth, 3))}
            schema["additionalProperties"] = False
        if len(required) == len(names) and rng.random() < 0.3:
            schema["maxProperties"] = len(required) + rng.randint(0, 2)
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth) for _ in range(self._rng.randint(1, 3))]}

    def _all_of(self, depth: int) -> Schema:
        low = self._rng.randint(-20, 20)
        pairs: list[Schema] = [
            {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._rng.randint(0, 30)}]},
            {"allOf": [self._object(depth)], "type": "object"},
            {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "null"}]},
            {"type": "string", "allOf": [{"minLength": 2}, {"pattern": "^[ab]*$"}]},
        ]
        return self._rng.choice(pairs)


class Writer:
    """Writes a text by drawing tokens that a matcher allows; past `budget` tokens it closes what is open."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.tokenizer = tokenizer
        self._eos = eos_token_id
        self._mask = np.zeros((vocab_size + 31) // 32, np.uint32)
        pieces = [tokenizer.token_bytes[token_id] for token_id in range(tokenizer.vocab_size)]
        self._closing = np.array([piece in (b'"', b"}", b"]", b'"}', b'"]', b"]}", b"}}") for piece in pieces])
        self._short = np.array([len(piece) == 1 for piece in pieces])

    def text(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def allowed(self, matcher: Matcher) -> np.ndarray:
        """Ids of the tokens that may follow, in order."""
        matcher.fill(self._mask)
        return np.flatnonzero(np.unpackbits(self._mask.view(np.uint8), bitorder="little"))

    def write(self, matcher: Matcher, rng: random.Random, *, budget: int, limit: int) -> tuple[list[int], bool]:
        """Token ids without the end, and whether the text was ended before `limit` tokens."""
        tokens: list[int] = []
        while len(tokens) < limit:
            ids = self.allowed(matcher)
            closing = len(tokens) >= budget
            if self._eos in ids:
                if len(ids) == 1 or closing or rng.random() < 0.5:
                    assert matcher.accept(self._eos)
                    return tokens, True
                ids = ids[ids != self._eos]
            token_id = self._draw(ids, rng, closing)
            assert matcher.accept(token_id), f"{token_id} was allowed and is refused"
            tokens.append(token_id)
        return tokens, False

    def _draw(self, ids: np.ndarray, rng: random.Random, closing: bool) -> int:
        if closing or rng.random() < 0.35:
            ends = ids[self._closing[ids]]
            if len(ends):
                return int(rng.choice(ends))
        if closing or rng.random() < 0.3:
            short = ids[self._short[ids]]
            if len(short):
                return int(rng.choice(short))
        return int(rng.choice(ids))
