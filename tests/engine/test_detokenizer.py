"""Growing text against `tokenizer.decode` of all tokens, for byte-level and SentencePiece tokenizers."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagemill.engine import detokenizer
from pagemill.engine.detokenizer import Detokenizer
from pagemill.engine.loader import resolve_model
from pagemill.engine.tokenizer import Tokenizer

HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇩🇪🇫🇷 flags, 👍🏽 tone",
    "สวัสดีครับ ภาษาไทย น้ำ ที่นี่",
    "مرحبا بالعالم، كيف حالُكَ؟",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 z\u0351\u0361\u0363",
    "line\r\nline\rline\n\n\ttab\u00a0nbsp\u200bzero",
    "客单价 🌶 日本語テキスト 한국어",
    "a\ufffdb \ufffd\ufffd literal replacement characters",
    "def f(x):\n    return x ** 2  # 𒀭 𐍈 🀄",
    "<|im_start|>user\nhi<|im_end|>",
]
unhurried = settings(deadline=None)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("smollm2-135m").path)


def _sentencepiece(decoder: object) -> Tokenizer:
    """Pieces as Llama 2's tokenizer has them: words with a mark in front, white space runs, bytes, BOS and EOS."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁▁▁▁", "▁Hello", "▁world", "Hello", "wor", "ld", "▁客", "单", "!", "\n", ",", "▁the", "é"]
    rust = RustTokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    rust.decoder = decoder  # type: ignore[assignment]
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(steps))


def _deltas(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    growing = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(growing.append(token_id) for token_id in ids), growing.flush()]


@unhurried
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=60), skip=st.booleans())
def test_byte_level_equals_decode_for_any_tokens(smollm: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(_deltas(smollm, ids, skip=skip)) == smollm.decode(ids, skip)


@unhurried
@given(text=st.text() | st.sampled_from(HARD_TEXTS))
@example(text="🌶")
def test_text_is_whole_and_no_delta_holds_half_a_character(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assume(smollm.decode(ids, False) == text)  # the vocabulary lacks some bytes of far-away planes
    deltas = _deltas(smollm, ids, skip=False)
    assert "".join(deltas) == text
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@unhurried
@given(text=st.sampled_from(HARD_TEXTS), data=st.data())
def test_the_prompt_is_never_in_the_output(smollm: Tokenizer, text: str, data: st.DataObject) -> None:
    """Cut anywhere, also in mid-character: prompt text + output text is the whole text, that character left out."""
    ids = smollm.backend.encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    before = smollm.decode(ids[:cut], False)
    output = "".join(_deltas(smollm, ids[cut:], tuple(ids[:cut]), skip=False))
    whole_characters = before.rstrip("\ufffd") if not text.startswith(before) else before
    assert text.startswith(whole_characters)
    assert output == text[len(before) :]


@pytest.mark.parametrize(("text", "kept"), [("🌶 hot", " hot"), ("客", "")])
def test_a_character_begun_in_the_prompt_belongs_to_the_prompt(smollm: Tokenizer, text: str, kept: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids[:1]) == "\ufffd", "the text must begin with a character of several tokens"
    for cut in (1, 2):
        assert "".join(_deltas(smollm, ids[cut:], tuple(smollm.encode("Hello ") + ids[:cut]))) == kept


def test_a_prompt_that_ends_in_mid_character_and_is_not_continued(smollm: Tokenizer) -> None:
    half = tuple(smollm.encode("x") + smollm.encode("🌶")[:1])
    assert "".join(_deltas(smollm, smollm.encode("abc"), half)) == "abc"
    assert "".join(_deltas(smollm, [], half)) == ""
    assert "".join(_deltas(smollm, smollm.encode("客"), half)) == "客"


def test_generation_that_stops_in_mid_character_has_one_replacement_character(smollm: Tokenizer) -> None:
    for text in ("ok 🌶", "ok 客"):
        ids = smollm.encode(text)[:-1]
        deltas = _deltas(smollm, ids)
        assert "".join(deltas) == "ok \ufffd" == smollm.decode(ids)
        assert "\ufffd" not in "".join(deltas[:-1])


def test_special_tokens_are_left_out_or_shown(smollm: Tokenizer) -> None:
    ids = smollm.encode("a<|im_end|>b")
    assert "".join(_deltas(smollm, ids)) == "ab"
    assert "".join(_deltas(smollm, ids, skip=False)) == "a<|im_end|>b"


def test_an_id_beyond_the_tokenizer_has_no_text(smollm: Tokenizer) -> None:
    assert "".join(_deltas(smollm, [*smollm.encode("a"), 49152, 60000, *smollm.encode("b")])) == "ab"


@unhurried
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_equals_decode(llama: Tokenizer, data: st.DataObject, skip: bool) -> None:
    character = st.sampled_from("é客🌶ñ")
    byte_run = character.map(lambda c: [3 + byte for byte in c.encode()])
    other = st.integers(259, llama.vocab_size - 1).map(lambda token: [token]) | st.sampled_from([[1], [2]])
    ids = [token for run in data.draw(st.lists(byte_run | other, max_size=30)) for token in run]
    assert "".join(_deltas(llama, ids, skip=skip)) == llama.decode(ids, skip)


@unhurried
@given(data=st.data())
def test_sentencepiece_bytes_mean_what_utf8_says(llama: Tokenizer, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=20))
    assert "".join(_deltas(llama, [3 + byte for byte in raw], (262,))) == raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([], ["▁Hello", "▁world"], "Hello world"),
        (["<s>"], ["▁Hello", "▁world"], "Hello world"),
        (["<s>", "▁Hello"], ["▁world", "!"], " world!"),
        (["<s>", "▁"], ["▁world"], " world"),
        ([], ["▁▁", "Hello"], " Hello"),
        ([], ["</s>", "▁Hello"], "Hello"),
    ],
)
def test_sentencepiece_leading_space(llama: Tokenizer, prompt: list[str], output: list[str], text: str) -> None:
    """Dropped where the text begins, kept where the output goes on from a prompt's text."""
    to_ids = llama.backend.token_to_id
    prompt_ids, ids = [to_ids(p) for p in prompt], [to_ids(p) for p in output]
    assert "".join(_deltas(llama, ids, tuple(prompt_ids))) == text
    before = llama.decode(prompt_ids)
    assert llama.decode(prompt_ids + ids) == before + text


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")])
@unhurried
@given(data=st.data())
def test_metaspace_equals_decode(decoder: object, data: st.DataObject) -> None:
    tokenizer = _sentencepiece(decoder)
    ids = data.draw(st.lists(st.integers(259, tokenizer.vocab_size - 1), max_size=10))
    assert "".join(_deltas(tokenizer, ids)) == tokenizer.decode(ids)


@unhurried
@given(ids=st.lists(st.integers(0, 3), max_size=6))
def test_a_tokenizer_without_decoder_joins_by_spaces(ids: list[int]) -> None:
    rust = RustTokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))
    assert "".join(_deltas(tokenizer, ids)) == tokenizer.decode(ids)


class Watched:
    """A tokenizer's table of bytes, and how often it was asked. There is nothing else: no `decode` of all ids again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.token_bytes
        self.token_bytes = self
        self.asked = 0

    def __getitem__(self, token_id: int) -> bytes:
        self.asked += 1
        return self._pieces[token_id]

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._pieces, name)


def test_cost_does_not_grow_with_the_text(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is looked up a few times, and its bytes are decoded at most once, however much text stands before."""
    decoded = 0

    class Utf8(codecs.getincrementaldecoder("utf-8")):  # type: ignore[misc]
        def decode(self, data: bytes, final: bool = False) -> str:
            nonlocal decoded
            decoded += len(data)
            return super().decode(data, final)

    monkeypatch.setattr(detokenizer, "_Utf8Decoder", Utf8)
    ids = smollm.encode("The quick brown fox 客单价🌶. ") * 400
    watched: Any = Watched(smollm)
    text = "".join(_deltas(watched, ids))
    assert 0 < decoded <= len(text.encode())
    assert watched.asked <= 6 * len(ids)
