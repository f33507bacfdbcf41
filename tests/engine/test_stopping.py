"""Stop strings, stop ids, lengths and resuming, on forced tokens of a real tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.errors import RequestError
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.stopping import Finish, StopStrings
from pagemill.engine.tokenizer import Tokenizer

EOS, OTHER_EOS = 2, 0
NEWLINE = 198
unhurried = settings(deadline=None)


@dataclass
class Run:
    """What a request saw: one delta for each take, how many tokens it took, and how it ended."""

    deltas: list[str]
    num_tokens: int
    finish: Finish | None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def _request(output: list[int] | None = None, max_tokens: int = 1000, **params: Any) -> Request:
    return Request("r", [28], SamplingParams(**params), 0, max_tokens, output_token_ids=list(output or ()))


def _run(tokenizer: Tokenizer, ids: list[int], *, every: int = 1, max_tokens: int = 1000, **params: Any) -> Run:
    """Force `ids`, taking the text after each `every` tokens and at the end."""
    processor = OutputProcessor(tokenizer, _request(max_tokens=max_tokens, **params), (EOS, OTHER_EOS))
    deltas, count, finish = [], 0, None
    for count, token_id in enumerate(ids, start=1):
        finish = processor.append(token_id)
        if finish is not None:
            break
        if count % every == 0:
            deltas.append(processor.take_text())
            assert processor.text_length == len("".join(deltas))
    processor.finish()
    deltas.append(processor.take_text())
    return Run(deltas, count, finish)


def _first_to_complete(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """End, start and stop of the match that wins, by trying every character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end, end - len(longest), longest
    return None


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("stop", [["a", "is"], ["is", "a"]])
def test_the_earliest_match_wins_whatever_the_order(tokenizer: Tokenizer, every: int, stop: list[str]) -> None:
    run = _run(tokenizer, tokenizer.encode(" The user is a cat"), every=every, stop=stop)
    assert (run.text, run.finish) == (" The user ", Finish("stop", "is"))


@pytest.mark.parametrize("stop", ["hello world", "lo w", "o world!", "llo", "! The"])
def test_a_stop_string_across_tokens_never_leaks(tokenizer: Tokenizer, stop: str) -> None:
    text = "Say hello world! The end"
    run = _run(tokenizer, tokenizer.encode(text), stop=stop)
    assert run.text == text[: text.index(stop)]
    assert run.finish == Finish("stop", stop)
    kept = _run(tokenizer, tokenizer.encode(text), stop=stop, include_stop_str_in_output=True)
    assert kept.text == text[: text.index(stop) + len(stop)]


def test_held_text_comes_at_the_end_when_nothing_matched(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("wait: hello wor")
    run = _run(tokenizer, ids, stop="hello world", max_tokens=len(ids))
    assert (run.text, run.finish) == ("wait: hello wor", Finish("length"))
    assert "hello" not in "".join(run.deltas[:-1])
    run = _run(tokenizer, [*ids, EOS], stop="hello world")
    assert (run.text, run.finish) == ("wait: hello wor", Finish("stop"))
    assert _run(tokenizer, ids, stop="hello world").text == "wait: hello wor", "cancelled"


@unhurried
@given(
    text=st.text(alphabet="ab \n客", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ab \n客", min_size=1, max_size=5), min_size=1, max_size=4),
    every=st.integers(1, 5),
    include=st.booleans(),
)
def test_stop_strings_against_trying_every_character(
    tokenizer: Tokenizer, text: str, stops: list[str], every: int, include: bool
) -> None:
    run = _run(tokenizer, tokenizer.encode(text), every=every, stop=stops, include_stop_str_in_output=include)
    expected = _first_to_complete(text, stops)
    if expected is None:
        assert (run.text, run.finish) == (text, None)
    else:
        end, start, stop = expected
        assert (run.text, run.finish) == (text[: end if include else start], Finish("stop", stop))


@unhurried
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_no_more_text_is_held_than_must_be(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    matcher.feed(text, counts=False)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    assert matcher.held == max((len(b) for b in beginnings if text.endswith(b)), default=0)


def test_min_tokens_holds_for_strings_ids_and_eos(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("x")
    for early, params in ((NEWLINE, {"stop": "\n"}), (NEWLINE, {"stop_token_ids": [NEWLINE]}), (EOS, {})):
        ids = [*word, early, *word * 8, early, *word * 3]
        run = _run(tokenizer, ids, min_tokens=10, **params)
        assert run.num_tokens == 11
        assert run.finish is not None and run.finish.reason == "stop"
        assert _run(tokenizer, ids, **params).num_tokens == 2


def test_a_match_that_began_before_min_tokens_counts_when_it_completes_after(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    assert len(ids) == 4
    run = _run(tokenizer, ids, min_tokens=2, stop="two three")
    assert (run.text, run.num_tokens) == ("one ", 3)
    run = _run(tokenizer, ids, min_tokens=3, stop="two three")
    assert (run.text, run.finish) == ("one two three four", None)


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_every_eos_ends_and_ignore_eos_ignores_every_one(tokenizer: Tokenizer, eos: int) -> None:
    ids = [*tokenizer.encode("one"), eos, *tokenizer.encode(" two")]
    run = _run(tokenizer, ids)
    assert (run.text, run.num_tokens, run.finish) == ("one", 2, Finish("stop"))
    run = _run(tokenizer, ids, ignore_eos=True, max_tokens=3)
    assert (run.text, run.num_tokens, run.finish) == ("one two", 3, Finish("length"))
    assert _run(tokenizer, ids, ignore_eos=True, stop_token_ids=[eos]).finish == Finish("stop", eos)


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_a_text_is_not_part_of_it(tokenizer: Tokenizer, skip: bool) -> None:
    one, two = tokenizer.encode("one two")
    run = _run(tokenizer, [one, two, one], stop_token_ids=[two], skip_special_tokens=skip)
    assert (run.text, run.num_tokens, run.finish) == ("one", 2, Finish("stop", two))
    assert _run(tokenizer, [one, EOS], skip_special_tokens=skip).text == "one"


def test_what_ends_a_text_is_shown_with_include_stop(tokenizer: Tokenizer) -> None:
    """The token as well as the string, as vLLM has it."""
    one, two = tokenizer.encode("one two")
    for params, text in (
        ({"stop_token_ids": [two]}, "one two"),
        ({"stop_token_ids": [two], "stop": ["two"]}, "one two"),
        ({"stop": ["tw"]}, "one tw"),
    ):
        run = _run(tokenizer, [one, two, one], include_stop_str_in_output=True, **params)
        assert (run.text, run.num_tokens) == (text, 2)
    for skip, text in ((True, "one"), (False, "one<|im_end|>")):
        run = _run(tokenizer, [one, EOS], include_stop_str_in_output=True, skip_special_tokens=skip)
        assert (run.text, run.finish) == (text, Finish("stop"))


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_may_be_a_stop_string(tokenizer: Tokenizer, skip: bool) -> None:
    """Also where it does not show: a model that ends its turns by a token which its files do not call an end."""
    start = tokenizer.special_token_ids["<|im_start|>"]
    ids = [*tokenizer.encode("one two"), start, *tokenizer.encode("user")]
    params: dict[str, Any] = {"stop": ["\n", "<|im_start|>"], "skip_special_tokens": skip}
    run = _run(tokenizer, ids, **params)
    assert (run.text, run.num_tokens, run.finish) == ("one two", 3, Finish("stop", "<|im_start|>"))
    assert _run(tokenizer, ids, min_tokens=3, **params).finish is None
    shown = _run(tokenizer, ids, include_stop_str_in_output=True, **params)
    assert shown.text == ("one two" if skip else "one two<|im_start|>")


def test_a_stop_string_wins_over_the_length_at_the_same_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two")
    run = _run(tokenizer, ids, stop=" two", max_tokens=2)
    assert (run.text, run.finish) == ("one", Finish("stop", " two"))


def test_half_a_character_at_the_length(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🌶")[:-1]
    run = _run(tokenizer, ids, max_tokens=len(ids))
    assert (run.text, run.finish) == ("ok \ufffd", Finish("length"))


@unhurried
@given(
    text=st.text(alphabet="ab 客🌶\n", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab 客\n", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    ids = [*tokenizer.encode(text), EOS]
    params: dict[str, Any] = {"stop": stops, "min_tokens": min_tokens}
    whole = _run(tokenizer, ids, **params)
    cut = data.draw(st.integers(0, whole.num_tokens))
    ended = whole.finish is not None and cut == whole.num_tokens
    before = whole.text if ended else "".join(whole.deltas[:cut])
    resumed = OutputProcessor(tokenizer, _request(ids[:cut], **params), (EOS, OTHER_EOS))
    assert resumed.text_length == len(before)
    assert resumed.finished == (whole.finish if ended else None)
    finish, after = resumed.finished, ""
    for token_id in ids[cut : whole.num_tokens]:
        finish = resumed.append(token_id)
        after += resumed.take_text()
    resumed.finish()
    assert (before + after + resumed.take_text(), finish) == (whole.text, whole.finish)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from([*range(1, 60), *range(600, 640), 29990, EOS, OTHER_EOS]), min_size=1, max_size=30),
    with_tokenizer=st.booleans(),
    max_tokens=st.sampled_from([1, 5, 1000]),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([[], [40, 610]]),
    reasoning=st.booleans(),
    stop=st.sampled_from([[], [], ["e"]]),
)
def test_a_token_passed_on_is_a_token_appended(
    tokenizer: Tokenizer,
    ids: list[int],
    with_tokenizer: bool,
    max_tokens: int,
    reasoning: bool,
    stop: list[str],
    **params: Any,
) -> None:
    """The short way says the same as the long one, or nothing has happened: text, its length, the end."""
    used = tokenizer if with_tokenizer else None
    request = _request(max_tokens=max_tokens, stop=stop if with_tokenizer else [], **params)
    request.reasoning_parser = "qwen3" if reasoning and with_tokenizer else None
    long, short = (OutputProcessor(used, request, (EOS, OTHER_EOS)) for _ in range(2))
    for token_id in ids:
        finish = long.append(token_id)
        text = short.pass_on(token_id)
        if text is None:
            assert short.append(token_id) == finish
            text = short.take_text()
        else:
            assert finish is None and not request.params.stop
        assert text == long.take_text() and short.text_length == long.text_length
        assert short.reasoning_tokens == long.reasoning_tokens
        if finish is not None:
            break
    for each in (long, short):
        each.finish()
    assert short.take_text() == long.take_text()


def test_without_a_tokenizer_ids_and_lengths_still_end_a_request() -> None:
    processor = OutputProcessor(None, _request(stop_token_ids=[5], max_tokens=3), (EOS,))
    assert [processor.append(token) for token in (7, 5)] == [None, Finish("stop", 5)]
    assert processor.take_text() == ""
    with pytest.raises(RequestError) as caught:
        OutputProcessor(None, _request(stop=["x"]), (EOS,))
    assert caught.value.param == "stop"


def test_the_longest_stop_strings_are_cheap(tokenizer: Tokenizer) -> None:
    """16 strings of 1024 characters that all but match: the work per character stays constant."""
    stops = ["a" * 1023 + chr(98 + index) for index in range(16)]
    matcher = StopStrings(stops)
    assert matcher.feed("a" * 200_000) is None
    assert matcher.held == 1023
    found = matcher.feed("c")
    assert found is not None and found.stop == stops[1]


def test_tokens_of_a_plain_text_that_are_known_are_passed_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon a time there was a plain text.")
    first, second = (OutputProcessor(tokenizer, _request(max_tokens=100), (EOS, OTHER_EOS)) for _ in range(2))
    for token_id in ids:
        first.append(token_id)
    told = "".join(second.pass_on(token_id) or "" for token_id in ids)
    assert told == first.take_text() and second.num_tokens == len(ids)
    assert second.pass_on(EOS) is None and second.pass_on(-1) is None
