"""A model's reasoning in front of its answer, found while the text grows.

Models that think write their thoughts first, between markers of their own; these are read:

* qwen3 (Qwen3, DeepSeek, SmolLM3, GLM and most others): `<think>` at the beginning of the text, up to `</think>`.
* deepseek_r1: the same, where the prompt has the opening tag already (QwQ, Qwen3-Thinking, DeepSeek R1), or where a
  model leaves it out: what stands before `</think>` is reasoning.
* granite: `Here is my thought process:` up to `Here is my response:`, or `<think>` and the answer in `<response>`.
* mistral (Magistral): `[THINK]` up to `[/THINK]`.
* openai_gptoss: see `harmony`.

Reasoning is read at the beginning only: an answer may speak of these markers. One that is not closed goes on to the end
of the text. White space at both ends of the reasoning, and before the answer, is left out. The same pieces come out
however the text is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pagemill.engine.harmony import MARKERS, HarmonyReader
from pagemill.engine.state_reader import StateReader
from pagemill.engine.tool_pieces import SPACE, Piece, Pieces, first_of, overlap

ReasoningParserName = Literal["deepseek_r1", "qwen3", "granite", "mistral", "openai_gptoss"]
ReasoningParserSetting = Literal["auto", "none", ReasoningParserName]
REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParserName)
_RESPONSES = ("Here is my response:", "Here's my response:")
_THINK: Mapping[str, tuple[str, ...]] = {"<think>": ("</think>",)}


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How reasoning is marked. `closers`: what ends it, by what began it. `begins_inside`: it has begun before the
    text does. `wrapper`: tags around the answer behind it. `more`: other markers of the form."""

    closers: Mapping[str, tuple[str, ...]]
    begins_inside: bool = False
    wrapper: tuple[str, str] | None = None
    more: tuple[str, ...] = ()

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(self.closers)

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, which have to stay in the text for the form to be seen."""
        closers = dict.fromkeys(marker for closers in self.closers.values() for marker in closers)
        return (*self.closers, *closers, *self.more)


FORMS: Mapping[ReasoningParserName, ReasoningForm] = {
    "deepseek_r1": ReasoningForm(_THINK, begins_inside=True),
    "qwen3": ReasoningForm(_THINK),
    "granite": ReasoningForm(
        {"Here is my thought process:": _RESPONSES, "Here's my thought process:": _RESPONSES, **_THINK},
        wrapper=("<response>", "</response>"),
    ),
    "mistral": ReasoningForm({"[THINK]": ("[/THINK]",)}),
    "openai_gptoss": ReasoningForm({"<|channel|>analysis<|message|>": ("<|channel|>final<|message|>",)}, more=MARKERS),
}


def reasoning_parser_of(template: str) -> ReasoningParserName | None:
    """The form in which a model reasons, by what its chat template mentions. None: another one, or it does not."""
    if "[THINK]" in template:
        return "mistral"
    if "<|channel|>analysis" in template:
        return "openai_gptoss"
    if "Here is my thought process" in template or "<response></response>" in template:
        return "granite"
    return "qwen3" if "<think>" in template or "</think>" in template else None


def in_prompt(parser: ReasoningParserName, end: str) -> ReasoningParserName | None:
    """The form of a text behind a prompt, of whose last turn `end` is what stands there already. None: the reasoning is
    over, or was left out, and the text is the answer."""
    form = FORMS[parser]
    opened = max((end.rfind(opener) for opener in form.openers), default=-1)
    closed = max(end.rfind(closer) for closers in form.closers.values() for closer in closers)
    if closed > opened or (opened < 0 and end.strip(SPACE)):
        return None
    if opened < 0:
        return parser
    return "deepseek_r1" if end.rfind("<think>") == opened else parser


def reasoning_reader(parser: ReasoningParserName) -> ReasoningReader | HarmonyReader:
    """Reads what a request's tokens are: reasoning, or its answer."""
    return HarmonyReader() if parser == "openai_gptoss" else ReasoningReader(parser)


class ReasoningReader(StateReader):
    """Reads one choice's text piece by piece."""

    def __init__(self, parser: ReasoningParserName) -> None:
        super().__init__(self._begin, Pieces())
        self._form = FORMS[parser]
        self._closers: tuple[str, ...] = ()
        self._has_text = False  # of the reasoning, or of the answer behind it

    @property
    def is_inside(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._state == self._reason

    @property
    def is_over(self) -> bool:
        """Whether all that comes is answer."""
        return self._state not in (self._begin, self._reason)

    def _end(self, rest: str) -> None:
        if self._state == self._begin and self._form.begins_inside:
            self._tell(rest.strip(SPACE), is_reasoning=True)
        elif self._state == self._reason:
            self._tell(rest.rstrip(SPACE) if self._has_text else rest.strip(SPACE), is_reasoning=True)
        elif self._state != self._read_lead:
            self._tell(rest)
        elif rest.strip(SPACE):
            self._tell(rest.lstrip(SPACE))

    def _tell(self, text: str, *, is_reasoning: bool = False) -> None:
        if text:
            self._pieces.add(Piece(text, is_reasoning=is_reasoning))

    def _begin(self) -> bool:
        bare = self._buffer.lstrip(SPACE)
        opener = next((opener for opener in self._form.openers if bare.startswith(opener)), None)
        if opener is not None:
            self._closers = self._form.closers[opener]
            self._buffer, self._state = bare[len(opener) :], self._reason
            return True
        if any(opener.startswith(bare) for opener in self._form.openers):
            return False
        if self._form.begins_inside:
            self._closers = self._form.closers[self._form.openers[0]]
            self._state = self._reason
        else:
            self._state = self._pass
        return True

    def _reason(self) -> bool:
        if not self._has_text:
            self._buffer = self._buffer.lstrip(SPACE)
        found = first_of(self._closers, self._buffer)
        if found is not None:
            at, closer = found
            self._tell(self._buffer[:at].rstrip(SPACE), is_reasoning=True)
            self._buffer, self._state = self._buffer[at + len(closer) :], self._read_lead
            return True
        sure = self._buffer[: len(self._buffer) - overlap(self._buffer, self._closers)].rstrip(SPACE)
        self._has_text = self._has_text or bool(sure)
        self._tell(sure, is_reasoning=True)
        self._buffer = self._buffer[len(sure) :]
        return False

    def _read_lead(self) -> bool:
        """Between the reasoning and the answer."""
        bare = self._buffer.lstrip(SPACE)
        if not bare:
            return False
        if self._form.wrapper is not None:
            opening = self._form.wrapper[0]
            if bare.startswith(opening):
                self._buffer, self._state, self._has_text = bare[len(opening) :], self._unwrap, False
                return True
            if opening.startswith(bare):
                return False
        self._buffer, self._state = bare, self._pass
        return True

    def _unwrap(self) -> bool:
        """In an answer between tags, whose closing one is held back until it turns out to be the end."""
        assert self._form.wrapper is not None
        closing = self._form.wrapper[1]
        if not self._has_text:
            self._buffer = self._buffer.lstrip(SPACE)
        at = self._buffer.find(closing)
        if at >= 0:
            self._tell(self._buffer[:at])
            self._buffer, self._state = self._buffer[at + len(closing) :], self._pass
            return True
        sure = len(self._buffer) - overlap(self._buffer, (closing,))
        self._has_text = self._has_text or sure > 0
        self._tell(self._buffer[:sure])
        self._buffer = self._buffer[sure:]
        return False

    def _pass(self) -> bool:
        self._tell(self._buffer)
        self._buffer = ""
        return False
