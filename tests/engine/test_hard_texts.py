"""Hard texts, token by token, through every kind of tokenizer: deltas joined are the text, wherever it is cut or
stopped. The naive twin decodes everything again after each token and searches it with str.find."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pagemill.engine.llm import LLM
from pagemill.engine.loader import resolve_model
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.prompt import make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.stopping import Finish
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.text_tokenizers import HARD_TEXTS, KINDS, LOSSLESS, PLAIN_ADDED, SPECIALS, meaning
from tests.engine.tiny_models import CONFIGS, save_model

made = cache(lambda kind: KINDS[kind]())
unhurried = settings(deadline=None)
kinds = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Run:
    deltas: list[str] = field(default_factory=list)
    taken: int = 0
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    max_tokens: int = 10_000,
    told: int = 0,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Run:
    """Feed `ids` and take the text after each. `told`: what another engine has generated already."""
    request = Request("r", list(prompt), SamplingParams(**params), 0, max_tokens, output_token_ids=list(ids[:told]))
    processor = OutputProcessor(tokenizer, request, eos)
    run = Run(taken=told, finish=processor.finished)
    for token_id in ids[told:]:
        if run.finish is not None:
            break
        run.finish = processor.append(token_id)
        run.taken += 1
        run.deltas.append(processor.take_text())
    processor.finish()
    run.deltas.append(processor.take_text())
    return run


def encode(kind: str, name: str) -> list[int]:
    ids: list[int] = made(kind).backend.encode(HARD_TEXTS[name], add_special_tokens=False).ids
    return ids


@kinds
def test_deltas_joined_are_what_transformers_decodes(kind: str) -> None:
    for name in HARD_TEXTS:
        tokenizer, ids = made(kind), encode(kind, name)
        run = stream(tokenizer, ids)
        assert (
            run.text
            == tokenizer.transformers_tokenizer.decode(ids, skip_special_tokens=True)
            == meaning(tokenizer, ids)
        )
        assert "\ufffd" not in run.text
        if kind in LOSSLESS:
            spaces = str.maketrans("▁", " ") if kind in ("llama", "gemma") else {}  # they write it for a space
            assert run.text == HARD_TEXTS[name].translate(spaces)


def test_the_decoder_of_a_whole_model_folder() -> None:
    theirs = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m").path)
    for name, text in HARD_TEXTS.items():
        ids = theirs(text).input_ids
        assert ids == encode("smollm", name)
        assert stream(made("smollm"), ids).text == theirs.decode(ids, skip_special_tokens=True) == text


@kinds
def test_cut_at_every_token(kind: str) -> None:
    """By max_tokens: the text up to there, U+FFFD once where it ends in mid-character, and not before."""
    for name in HARD_TEXTS:
        tokenizer, ids = made(kind), encode(kind, name)
        for cut in range(1, len(ids) + 1):
            run = stream(tokenizer, ids, max_tokens=cut)
            assert (run.taken, run.finish) == (cut, Finish("length"))
            assert run.text == meaning(tokenizer, ids[:cut])
            assert "\ufffd" not in run.text[:-1]


@pytest.mark.parametrize("character", ["é", "客", "🌶", "\U0010ffff"])
@pytest.mark.parametrize("kind", ["single-bytes", "gemma"])
def test_a_character_cut_at_each_byte(kind: str, character: str) -> None:
    tokenizer = made(kind)
    spelled = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in character.encode()]
    if kind == "single-bytes":
        spelled = tokenizer.backend.encode(character, add_special_tokens=False).ids
    assert len(spelled) == len(character.encode())
    for cut in range(1, len(spelled)):
        assert stream(tokenizer, spelled, max_tokens=cut).text == "\ufffd"
        # Lone bytes in the middle: what can become no character any more is told at once, the next text is whole.
        broken = [*spelled[:cut], *tokenizer.backend.encode("ab", add_special_tokens=False).ids]
        run = stream(tokenizer, broken)
        assert run.text == meaning(tokenizer, broken) and run.text.endswith("ab")
        assert "\ufffd" not in "".join(run.deltas[:cut])
    run = stream(tokenizer, spelled)
    assert run.deltas == [*[""] * (len(spelled) - 1), character, ""]


@kinds
def test_the_prompt_is_never_in_the_output(kind: str) -> None:
    for name in HARD_TEXTS:
        tokenizer, ids = made(kind), encode(kind, name)
        whole = meaning(tokenizer, ids)
        for cut in range(1, len(ids)):
            before = meaning(tokenizer, ids[:cut])
            if before.endswith("\ufffd"):
                continue  # a character begun in the prompt belongs to it: see test_detokenizer
            assert before + stream(tokenizer, ids[cut:], prompt=ids[:cut]).text == whole


@kinds
def test_another_engine_goes_on_anywhere(kind: str) -> None:
    for name in HARD_TEXTS:
        tokenizer, ids = made(kind), encode(kind, name)[:60]
        stop = meaning(tokenizer, ids)[-3:-1]
        for params in ({}, {"stop": [stop]} if stop else {}):
            whole = stream(tokenizer, ids, prompt=[5], **params)
            for cut in range(whole.taken):
                rest = stream(tokenizer, ids, prompt=[5], told=cut, **params)
                assert "".join(whole.deltas[:cut]) + rest.text == whole.text
                assert (rest.taken, rest.finish) == (whole.taken, whole.finish)


@kinds
def test_a_stop_string_anywhere_in_it(kind: str) -> None:
    """Within tokens and across them, alone and as the beginning of another one that never comes."""
    for name in HARD_TEXTS:
        tokenizer, ids = made(kind), encode(kind, name)
        text = meaning(tokenizer, ids)
        for start in range(0, len(text), max(1, len(text) // 12)):
            for length in (1, 2, 7):
                stop = text[start : start + length]
                at = text.index(stop)
                run = stream(tokenizer, ids, stop=[stop + "\x00", stop])
                assert (run.text, run.finish) == (text[:at], Finish("stop", stop))
                assert stream(tokenizer, ids, stop=[stop + "\x00"]).text == text, "held back, and given in the end"
                kept = stream(tokenizer, ids, stop=[stop], include_stop_str_in_output=True)
                assert kept.text == text[: at + len(stop)]


@kinds
def test_special_and_added_tokens_in_the_middle(kind: str) -> None:
    tokenizer = made(kind)
    if kind == "smollm":
        text = "a<|im_end|>b<|im_start|> c"
    else:
        text = f"a{SPECIALS[1]}b {SPECIALS[2]} c {PLAIN_ADDED[0]} {PLAIN_ADDED[1]} d{PLAIN_ADDED[2]}e {PLAIN_ADDED[3]}f"
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        run = stream(tokenizer, ids, skip_special_tokens=skip)
        assert run.text == tokenizer.transformers_tokenizer.decode(ids, skip_special_tokens=skip)
        for cut in range(1, len(ids)):
            assert stream(tokenizer, ids[:cut], skip_special_tokens=skip).text == meaning(
                tokenizer, ids[:cut], skip=skip
            )
        for name in SPECIALS[1:] if kind != "smollm" else ("<|im_end|>",):
            assert (name in run.text) != skip


@kinds
@unhurried
@given(data=st.data())
def test_any_tokens_at_all(kind: str, data: st.DataObject) -> None:
    """Invalid bytes too. WordPiece and others mind what stands first, or last."""
    tokenizer = made(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    skip = data.draw(st.booleans())
    assert stream(tokenizer, ids, skip_special_tokens=skip).text == meaning(tokenizer, ids, skip=skip)


# -- the naive twin ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    eos: tuple[int, ...]
    min_tokens: int
    max_tokens: int
    include: bool
    skip: bool


def naive(tokenizer: Tokenizer, ids: Sequence[int], wish: Wish) -> tuple[str, int, Finish | None]:
    """Text, tokens taken and end: everything decoded again after each token."""

    def whole(count: int) -> str:
        return meaning(tokenizer, ids[:count], skip=wish.skip).rstrip("\ufffd")

    def cut(text: str, after: int) -> tuple[str, Finish] | None:
        """The stop string that is complete first, behind the first `after` characters."""
        ends = [(at + len(stop), -len(stop), stop) for stop in wish.stop for at in _found(text, stop)]
        found = min((end for end in ends if end[0] > after), default=None)
        if found is None:
            return None
        end, _, stop = found
        return text[: end if wish.include else end - len(stop)], Finish("stop", stop)

    def end(shown: int, count: int, ended: Finish | None) -> tuple[str, int, Finish | None]:
        """The whole text, in which half a character at the end may complete a stop string."""
        text = meaning(tokenizer, ids[:shown], skip=wish.skip)
        match = cut(text, len(whole(shown))) if count > wish.min_tokens else None
        if match is None:
            return text, count, ended
        return match[0], count, None if ended is None else match[1]

    for count, token_id in enumerate(ids, start=1):
        counts = count > wish.min_tokens
        ended: Finish | None = None
        if counts and token_id in wish.eos:
            ended = Finish("stop")
        elif counts and token_id in wish.stop_token_ids:
            ended = Finish("stop", token_id)
        if counts and (ended is None or wish.include) and (match := cut(whole(count), len(whole(count - 1)))):
            return match[0], count, match[1]
        if ended is not None:
            return end(count if wish.include else count - 1, count, ended)
        if count == wish.max_tokens:
            return end(count, count, Finish("length"))
    return end(len(ids), len(ids), None)


def _found(text: str, stop: str) -> list[int]:
    places, at = [], text.find(stop)
    while at >= 0:
        places.append(at)
        at = text.find(stop, at + 1)
    return places


@pytest.mark.parametrize("kind", ["smollm", "byte-level", "single-bytes", "unigram", "llama", "gemma"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_processor_against_its_naive_twin(kind: str, data: st.DataObject) -> None:
    tokenizer = made(kind)
    letters = "ab \n客🌶e\u0301" if kind != "unigram" else "ab e"
    text = data.draw(st.text(letters, max_size=30) | st.sampled_from([*HARD_TEXTS.values()]))
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids[:60]
    ends = [tokenizer.backend.token_to_id(name) for name in SPECIALS]
    if kind == "smollm":
        ends = [0, 1, 2]
    for _ in range(data.draw(st.integers(0, 2))):
        # Between whole characters, so that each end has one meaning.
        at = data.draw(st.sampled_from([n for n in range(len(ids) + 1) if "\ufffd" not in meaning(tokenizer, ids[:n])]))
        ids = [*ids[:at], data.draw(st.sampled_from(ends)), *ids[at:]]
    shown = meaning(tokenizer, ids)
    pieces = st.integers(0, len(shown)).flatmap(lambda at: st.integers(1, 5).map(lambda n: shown[at : at + n]))
    stops = data.draw(st.lists(st.one_of(pieces, st.text(letters, min_size=1, max_size=4)).filter(bool), max_size=3))
    wish = Wish(
        tuple(dict.fromkeys(stops)),
        data.draw(st.sampled_from([(), (ends[1],), tuple(ids[5:6])])),
        data.draw(st.sampled_from([(), (ends[0],), (ends[0], ends[1])])),
        data.draw(st.integers(0, 8)),
        data.draw(st.integers(8, 70)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    run = stream(
        tokenizer,
        ids,
        eos=wish.eos,
        max_tokens=wish.max_tokens,
        stop=wish.stop,
        stop_token_ids=wish.stop_token_ids,
        min_tokens=wish.min_tokens,
        include_stop_str_in_output=wish.include,
        skip_special_tokens=wish.skip,
    )
    assert (run.text, run.taken, run.finish) == naive(tokenizer, ids, wish)
    assert all("\ufffd" not in delta for delta in run.deltas[:-2])


@pytest.mark.parametrize("include", [False, True])
def test_half_a_character_at_the_end_may_complete_a_stop_string(include: bool) -> None:
    tokenizer = made("gemma")
    ids = encode("gemma", next(name for name, text in HARD_TEXTS.items() if text.startswith("\u0928\u092e\u0938")))
    count = next(n for n in range(1, len(ids)) if meaning(tokenizer, ids[:n]).endswith("\ufffd"))
    wish = Wish(("\ufffd",), (), (), 0, count, include, True)
    run = stream(tokenizer, ids, max_tokens=count, stop=wish.stop, include_stop_str_in_output=include)
    assert run.finish == Finish("stop", "\ufffd")
    assert (run.text, run.taken, run.finish) == naive(tokenizer, ids, wish)


# -- in the engine -------------------------------------------------------------------------------------------------


def test_a_model_that_speaks_bytes(tmp_path: Path) -> None:
    """Random weights, a token for each byte. Stop strings that never come hold everything back until the end, and a
    cancelled request gives what was held."""
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path)
    made("single-bytes").transformers_tokenizer.save_pretrained(folder)
    llm = LLM(str(folder), threads=1, num_blocks_override=32, dtype="float32")
    tokenizer, core = made("single-bytes"), llm._parts.core
    wish: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    (plain,) = llm.generate("客", SamplingParams(**wish))
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    assert text == meaning(tokenizer, ids) and len(ids) == 40
    stop = text.rstrip("\ufffd") + "\x00"
    (held,) = llm.generate("客", SamplingParams(stop=stop, **wish))
    assert held.outputs[0].text == text
    for steps in (0, 1, 7, 39):
        params = SamplingParams(stop=stop, **wish)
        told = core.add(make_request("r", "客", params, llm._parts.limits, tokenizer))
        while sum(len(increment.token_ids) for increment in told) < steps:
            told += core.step()
        before = "".join(increment.text for increment in told)
        told += core.abort("r")
        assert (told[-1].finish_reason, told[-1].final) == ("cancelled", True)
        assert "".join(increment.text for increment in told) == meaning(tokenizer, ids[:steps])
        assert told[-1].text_offset == len(before)
    core.check()


def test_the_table_holds_what_it_says() -> None:
    names = {unicodedata.name(character, "") for text in HARD_TEXTS.values() for character in text}
    for script in ("THAI", "DEVANAGARI", "ARABIC", "HEBREW", "HANGUL CHOSEONG", "CUNEIFORM", "COMBINING", "TAG LATIN"):
        assert any(name.startswith(script) for name in names), script
