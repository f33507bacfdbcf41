"""Reasoning in front of an answer: every cut of the text gives the same, prompts say where it begins, structured output
begins where it ends, and its tokens are counted."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from pagemill.engine.admission import Limits
from pagemill.engine.answer_reader import AnswerReader
from pagemill.engine.chat import Chat
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.output_processor import OutputProcessor
from pagemill.engine.prompt import make_request
from pagemill.engine.reasoning import ReasoningReader, in_prompt, reasoning_parser_of, reasoning_reader
from pagemill.engine.reasoning_gate import GatedGrammar, GatedMatcher, ReasoningGate
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.tool_choice import ToolChoice
from pagemill.engine.tool_pieces import Piece, gathered
from pagemill.ingest.results import Choice, Result
from tests.engine.test_tool_forms import pieces_of

START, ANALYSIS, FINAL = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary"
# Form, text, reasoning, answer.
TEXTS: list[tuple[Any, str, str, str]] = [
    ("qwen3", "<think>\nHm, 2 < 3.\n</think>\n\nYes.\n", "Hm, 2 < 3.", "Yes.\n"),
    ("qwen3", "\n<think>a</think>b", "a", "b"),
    ("qwen3", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", "<think></think>", "", ""),
    ("qwen3", "<think>still thinking </thin", "still thinking </thin", ""),
    ("qwen3", "<think>two\n\nparts  </think> x </think> y", "two\n\nparts", "x </think> y"),
    ("qwen3", " Plain <think>text</think>.", "", " Plain <think>text</think>."),
    ("qwen3", "Yes</think>", "", "Yes</think>"),
    ("qwen3", "<thin", "", "<thin"),
    ("qwen3", "  ", "", "  "),
    ("qwen3", "<think>a</think>  <response>b</response>", "a", "<response>b</response>"),
    ("deepseek_r1", "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", "never ends <", "never ends <", ""),
    ("deepseek_r1", "<thin", "<thin", ""),
    ("deepseek_r1", "</think>\n\nYes.", "", "Yes."),
    ("granite", "Here is my thought process:\nHm.\n\nHere is my response:\n\nYes.", "Hm.", "Yes."),
    ("granite", "Here's my thought process: Hm. Here's my response: Yes.", "Hm.", "Yes."),
    ("granite", "Here is my answer: yes", "", "Here is my answer: yes"),
    ("granite", "<think>Hm.</think>\n<response>\nYes </r>.</response>", "Hm.", "Yes </r>."),
    ("granite", "<think>Hm.</think> <respite>", "Hm.", "<respite>"),
    ("granite", "<think>Hm.</think> <response>Yes </resp", "Hm.", "Yes </resp"),
    ("mistral", "[THINK]Hm [/x].[/THINK]Yes.", "Hm [/x].", "Yes."),
    ("openai_gptoss", f"{ANALYSIS}Hm <x>. <|end|>{START}{FINAL} Yes.\n\nNo.", "Hm <x>.", "Yes.\n\nNo."),
    ("openai_gptoss", f"{ANALYSIS}One{START}{ANALYSIS}Two<|end|>{START}{FINAL}Yes", "One\nTwo", "Yes"),
    ("openai_gptoss", f"{COMMENTARY}<|message|>First.<|end|>{START}{FINAL}Then.<|return|>", "", "First.\nThen."),
    ("openai_gptoss", f"{ANALYSIS}cut <|en", "cut <|en", ""),
    ("openai_gptoss", f"{ANALYSIS}a<|end|>{START}<|channel|>fin", "a", ""),
    ("openai_gptoss", "No <|channel|> at all", "", "No <|channel|> at all"),
    ("openai_gptoss", "to", "", "to"),
]


def read(parser: Any, parts: list[str]) -> tuple[str, str]:
    reader = reasoning_reader(parser)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    assert all(piece.text for piece in pieces)
    thought = "".join(piece.text for piece in pieces if piece.is_reasoning)
    return thought, "".join(piece.text for piece in pieces if not piece.is_reasoning)


@pytest.mark.parametrize(("parser", "text", "thought", "answer"), TEXTS)
def test_reasoning_is_found_wherever_the_text_is_cut(parser: Any, text: str, thought: str, answer: str) -> None:
    assert read(parser, [text]) == (thought, answer)
    for cut in range(1, len(text)):
        assert read(parser, [text[:cut], text[cut:]]) == (thought, answer), text[:cut]
    for seed in range(20):
        if len(text) > 1:
            assert read(parser, pieces_of(text, seed)) == (thought, answer), pieces_of(text, seed)


def test_every_cut_of_random_soups_gives_the_same() -> None:
    source = random.Random(5)
    bits = ["<think>", "</think>", "<response>", "</response>", "[THINK]", "[/THINK]", "Here is my response:", "<", "/"]
    bits += ["Here is my thought process:", "Here", "th", "ink>", "\n", " ", "x", "é", "]", "[/"]
    bits += [ANALYSIS, FINAL, START, "<|end|>", "<|message|>", "<|channel|>", " to=functions.now"]
    for _ in range(2000):
        text = "".join(source.choice(bits) for _ in range(source.randrange(1, 8)))
        for parser in ("qwen3", "deepseek_r1", "granite", "mistral", "openai_gptoss"):
            whole = read(parser, [text])
            assert read(parser, list(text)) == whole, (parser, text)


def test_reasoning_comes_as_it_is_written() -> None:
    """No word waits for the next one, but space does, which may be the end."""
    reader = ReasoningReader("deepseek_r1")
    told = [[piece.text for piece in reader.feed(part)] for part in ("\nHm", ",", " ", "two", "</", "b>", "</think>")]
    assert told == [["Hm"], [","], [], [" two"], [], ["</b>"], []]
    assert reader.is_over and reader.feed("\nYes") == [Piece("Yes")]


def test_calls_are_looked_for_in_the_answer_only() -> None:
    choice = ToolChoice(("now",), schemas={"now": {}})
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"<think>I could write {call}.</think>\n\nWell.\n{call}"
    for parts in ([text], list(text)):
        reader = AnswerReader("qwen3", "hermes", choice)
        pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
        assert "".join(piece.text for piece in pieces if piece.is_reasoning) == f"I could write {call}."
        said, calls = gathered(piece for piece in pieces if not piece.is_reasoning)
        assert (said, [each.name for each in calls], reader.has_calls) == ("Well.", ["now"], True)


def test_calls_on_a_channel() -> None:
    choice = ToolChoice(("now", "add"), schemas={})
    now = f"{COMMENTARY} to=functions.now <|constrain|>json<|message|><|call|>"
    add = f'{START} to=functions.add{COMMENTARY} json<|message|>{{"a": [1, 2]}} <|call|>'
    text = f"{ANALYSIS}I call.<|end|>{START}{COMMENTARY}<|message|>Look.<|end|>{START}{now}{add}"
    for parallel, expected in ((True, [("now", "{}"), ("add", '{"a": [1, 2]}')]), (False, [("now", "{}")])):
        for parts in ([text], list(text), [text[:90], text[90:]]):
            reader = AnswerReader("openai_gptoss", None, dataclasses.replace(choice, parallel=parallel))
            pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
            assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "I call."
            said, calls = gathered(piece for piece in pieces if not piece.is_reasoning)
            assert (said, [(each.name, each.arguments) for each in calls]) == ("Look.", expected)
            assert reader.has_calls
    forced = f'{ANALYSIS}Hm.<|end|>{START}{FINAL}[{{"name": "now", "arguments": {{}}}}]'
    reader = AnswerReader("openai_gptoss", "json", choice)
    _, calls = gathered(piece for piece in reader.read(forced) if not piece.is_reasoning)
    assert [each.name for each in calls] == ["now"]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("Here is my thought process:", "granite"),
        ("<think></think> ... <response></response>", "granite"),
        ("[THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ messages }} think", None),
        ("<seed:think>", None),
    ],
)
def test_templates_tell_the_form(template: str, parser: str | None) -> None:
    assert reasoning_parser_of(template) == parser


@pytest.mark.parametrize(
    ("parser", "end", "expected"),
    [
        ("qwen3", "", "qwen3"),
        ("qwen3", "<think>", "deepseek_r1"),
        ("qwen3", "</think>", None),
        ("qwen3", "<think>\nSo far", "deepseek_r1"),
        ("qwen3", "<think>Hm</think> So", None),
        ("qwen3", "So far", None),
        ("deepseek_r1", "", "deepseek_r1"),
        ("deepseek_r1", "</think>", None),
        ("granite", "<think>", "deepseek_r1"),
        ("mistral", "", "mistral"),
    ],
)
def test_a_prompt_may_have_begun_it_or_left_it_out(parser: Any, end: str, expected: str | None) -> None:
    assert in_prompt(parser, end) == expected


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])


def limits(tokenizer: Tokenizer, **settings: Any) -> Limits:
    ends = (tokenizer.eos_token_id or 0,)
    return Limits(tokenizer.vocab_size, 2048, 16, 200, 64, 8, ends, **settings)


def asked(tokenizer: Tokenizer, compiler: GrammarCompiler, setting: Any, said: str | None = None) -> Request:
    messages = [{"role": "user", "content": "Is it <think>?"}]
    messages += [] if said is None else [{"role": "assistant", "content": said}]
    chat = Chat(messages, continue_final_message=said is not None)
    params = SamplingParams(structured_outputs={"regex": "yes|no"})  # type: ignore[arg-type]
    own = limits(tokenizer, reasoning_parser=setting)
    return make_request("r", chat, params, own, tokenizer, compiler=compiler)


def test_requests_say_how_they_are_read(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """SmolLM2's template knows no reasoning, so only the setting makes it one that thinks."""
    assert asked(tokenizer, compiler, "auto").reasoning_parser is None
    assert asked(tokenizer, compiler, "none").reasoning_parser is None
    assert asked(tokenizer, compiler, "qwen3").reasoning_parser == "qwen3"
    assert asked(tokenizer, compiler, "qwen3", "<think>So").reasoning_parser == "deepseek_r1"
    over = asked(tokenizer, compiler, "qwen3", "<think>So</think>")
    assert over.reasoning_parser is None
    assert over.rules is not None and not isinstance(over.rules.grammar, GatedGrammar)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mode == 'open' %}<think>\n{% endif %}"
    "{% if mode == 'closed' %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("mode", "expected"), [("open", "deepseek_r1"), ("closed", None), ("", "qwen3")])
def test_the_template_decides_for_each_request(tokenizer: Tokenizer, mode: str, expected: str | None) -> None:
    rendered = copy.deepcopy(tokenizer.transformers_tokenizer)
    rendered.chat_template = TEMPLATE
    own = Tokenizer(rendered)
    assert own.reasoning_parser == "qwen3"
    for said in ("Hi", "Think: <think>", "</think>"):
        chat = Chat([{"role": "user", "content": said}], chat_template_kwargs={"mode": mode})
        assert make_request("r", chat, SamplingParams(), limits(own), own).reasoning_parser == expected
    assert make_request("r", "<think>", SamplingParams(), limits(own), own).reasoning_parser is None, "no chat"


def follow(matcher: GatedMatcher, tokenizer: Tokenizer, text: str, parts: list[str] | None = None) -> bool:
    """Whether every token of a text may follow; the mask has to say the same as `accept`."""
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for part in parts or [text]:
        for token_id in tokenizer.encode(part):
            fork = matcher.fork()
            matcher.fill(mask)
            allowed = bool(mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))
            accepted = matcher.accept(token_id)
            assert accepted == allowed == fork.accept(token_id), tokenizer.decode([token_id])
            if not accepted:
                return False
    return True


def gated(tokenizer: Tokenizer, compiler: GrammarCompiler, parser: Any) -> GatedMatcher:
    grammar = compiler.compile(StructuredOutputs(regex="yes|no|<table>|,yes"))
    return GatedGrammar(grammar, ReasoningGate.of(tokenizer, parser)).matcher()


@pytest.mark.parametrize(
    ("parser", "parts", "fits"),
    [
        ("qwen3", ["<think>", "Any text <b>", "</think>", "yes"], True),
        ("qwen3", ["<think>", "Any", "</think>", "\n\n"], False),
        ("qwen3", ["<think>", "Any", "</think>", "maybe"], False),
        ("qwen3", ["yes"], True),
        ("qwen3", ["<table>"], True),
        ("qwen3", ["<", "ta", "maybe"], False),
        ("qwen3", ["maybe"], False),
        ("deepseek_r1", ["Any", "</", "think", ">", "no"], True),
        ("deepseek_r1", ["no"], True),
        ("granite", ["Here is my thought process:", " Hm. ", "Here is my response:", "no"], True),
        ("openai_gptoss", [ANALYSIS, "Hm", "<|end|>", START, FINAL, "yes"], True),
        ("openai_gptoss", [ANALYSIS, "Hm", "<|end|>", START, FINAL, "maybe"], False),
    ],
)
def test_structure_begins_behind_the_reasoning(
    tokenizer: Tokenizer, compiler: GrammarCompiler, parser: Any, parts: list[str], fits: bool
) -> None:
    assert follow(gated(tokenizer, compiler, parser), tokenizer, "", parts) is fits


def test_a_text_cannot_end_in_its_reasoning(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    end = tokenizer.eos_token_id or 0
    matcher = gated(tokenizer, compiler, "deepseek_r1")
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    matcher.fill(mask)
    assert not mask[end // 32] >> np.uint32(end % 32) & np.uint32(1)
    assert not matcher.fork().accept(end) and not matcher.is_finished
    assert follow(matcher, tokenizer, "", ["Hm", "</think>", "no"]) and matcher.is_finished


def test_what_a_token_adds_behind_the_marker_belongs_to_the_structure(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """SmolLM2 spells the marker, and has tokens of its last letter and more."""
    own = {tokenizer.token_bytes[token_id]: token_id for token_id in range(tokenizer.vocab_size)}
    for piece, fits in ((b">,", True), (b">.", False)):
        matcher = gated(tokenizer, compiler, "deepseek_r1")
        assert follow(matcher, tokenizer, "", ["Hm", "</", "think"])
        assert matcher.accept(own[piece]) is fits
    assert not follow(gated(tokenizer, compiler, "deepseek_r1"), tokenizer, "", ["</", "think", ">", "\n"])


def test_results_tell_the_answer_apart() -> None:
    for parser, reasoning, answer in (("qwen3", "Hm.", "Yes."), (None, "", "<think>Hm.</think> Yes.")):
        choice = Choice(0, "<think>Hm.</think> Yes.", [1], "stop", None, reasoning_parser=parser)  # type: ignore[arg-type]
        assert (choice.reasoning, choice.answer) == (reasoning, answer)
        assert Result("r", "completed", [choice], {}, {}).answer == answer


def test_tokens_of_reasoning_are_counted(tokenizer: Tokenizer) -> None:
    """Whatever was said before by another engine, and with the markers."""
    thought, answer = tokenizer.encode("<think>\nHm, well.\n</think>"), tokenizer.encode("\n\nYes.")
    for said in (0, 3, len(thought), len(thought) + 1):
        request = Request("r", [1], SamplingParams(), 0, 100, reasoning_parser="qwen3")
        request.output_token_ids = (thought + answer)[:said]
        processor = OutputProcessor(tokenizer, request, ())
        for token_id in (thought + answer)[said:]:
            processor.append(token_id)
        assert processor.reasoning_tokens == len(thought)
    request = Request("r", [1], SamplingParams(), 0, 100, reasoning_parser="qwen3")
    processor = OutputProcessor(tokenizer, request, ())
    for token_id in answer:
        processor.append(token_id)
    assert processor.reasoning_tokens == 0
