"""A tokenizer of every kind that causal models have, made on the spot, and what their ids mean, worked out naively."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagemill.engine.loader import resolve_model
from pagemill.engine.tokenizer import Tokenizer

HARD_TEXTS = {
    "family": "👩‍👩‍👧‍👦 family, 👨🏿‍🚀 astronaut, 👩🏽‍❤️‍💋‍👨🏻 kiss",
    "flags": "🇩🇪🇫🇷🇺🇦 and 🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f and 🏳️‍🌈",
    "tones": "👍🏻👍🏼👍🏽👍🏾👍🏿",
    "keycaps": "1️⃣ #️⃣ ©️ ™",
    "thai": "สวัสดีครับ ภาษาไทย น้ำ ที่นี่",
    "devanagari": "नमस्ते दुनिया, क्षत्रिय र्‍य",
    "arabic": "مَرْحَبًا بِالْعَالَمِ، كيف حالُكَ؟",
    "hebrew": "שָׁלוֹם עוֹלָם",
    "jamo": "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8",
    "combining": "e\u0301 a\u0308 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343a\u0363\u0308l\u0348g\u0321o",
    "lines": "line\r\nline\rline\n\n\ttab\t\ttabs\x0b\x0c end \n ",
    "spaces": "a\u00a0b\u2003c\u200bd\ufeffe\u3000f  two   three    four",
    "planes": "𒀭 𐍈 🀄 \U0001d573\U0001d58a \U0001f9ff \U0010fffd",
    "private": "\ue000\uf8ff\U000f0000 use",
    "cjk": "客单价 🌶 日本語テキスト、한국어。",
    "code": "def f(x):\n    return x ** 2  # «note»\n\nif __name__ == '__main__':\n\tprint(f(3))\n",
    "long": "=" * 300 + "a" * 200 + " " * 100 + "-",
    "punctuation": " . , ? ! don't do not it's they 've , ' x ' y",
    "marks": "▁ ▁▁ Ġ Ċ ## </w> <0x41> ↵",
}
SPECIALS = ("<s>", "</s>", "<|end|>")
PLAIN_ADDED = ("<tool_call>", "</think>", "客户端", "é!")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _finish(rust: Any) -> Tokenizer:
    rust.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    flags: list[dict[str, bool]] = [{}, {"lstrip": True, "rstrip": True}, {"normalized": True}, {"normalized": False}]
    rust.add_tokens([AddedToken(name, special=False, **own) for name, own in zip(PLAIN_ADDED, flags, strict=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))


def smollm() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("smollm2-135m").path)


def byte_level() -> Tokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(HARD_TEXTS.values(), trainer)
    return _finish(rust)


def single_bytes() -> Tokenizer:
    """A token for each byte: every character of more than one is cut everywhere."""
    rust = RustTokenizer(
        models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return _finish(rust)


def unigram() -> Tokenizer:
    """As T5's and XGLM's: a space is written before the text."""
    rust = RustTokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    special = ["<unk>", *SPECIALS]
    trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=special, show_progress=False)
    rust.train_from_iterator(HARD_TEXTS.values(), trainer)
    return _finish(rust)


def _byte_fallback() -> Any:
    words = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({*"▁", *(chr(number) for number in range(33, 127)), *"éสा한"})
    merges = [("▁", "▁"), ("▁", "a"), ("i", "n"), ("▁", "t"), ("▁t", "h"), ("=", "="), ("==", "==")]
    words += [*letters, *(left + right for left, right in merges)]
    return RustTokenizer(
        models.BPE({word: n for n, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    )


def llama() -> Tokenizer:
    """As Llama 2's: the normalizer writes a space before the text, the decoder takes it off."""
    rust = _byte_fallback()
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(rust)


def gemma() -> Tokenizer:
    """As Gemma's: no space before the text."""
    rust = _byte_fallback()
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finish(rust)


def word_piece() -> Tokenizer:
    """As BERT's, which has causal models too."""
    rust = RustTokenizer(models.WordPiece(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    rust.train_from_iterator(HARD_TEXTS.values(), trainer)
    return _finish(rust)


def word_ends() -> Tokenizer:
    """As the first GPT's: a suffix at the end of words."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.BPEDecoder(suffix="</w>")
    special = ["<unk>", *SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, end_of_word_suffix="</w>", show_progress=False
    )
    rust.train_from_iterator(HARD_TEXTS.values(), trainer)
    return _finish(rust)


def words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    rust = RustTokenizer(models.WordLevel(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.train_from_iterator(HARD_TEXTS.values(), trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIALS]))
    return _finish(rust)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "smollm": smollm,
    "byte-level": byte_level,
    "single-bytes": single_bytes,
    "unigram": unigram,
    "llama": llama,
    "gemma": gemma,
    "word-piece": word_piece,
    "word-ends": word_ends,
    "words": words,
}
LOSSLESS = ("smollm", "byte-level", "single-bytes", "llama", "gemma")


def meaning(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    """The text of all ids at once: transformers' decode, but for byte fallback, which makes U+FFFD of whole characters
    too where another of the same run is cut. There, UTF-8 decides."""
    backend = tokenizer.backend
    decoder = backend.decoder
    if not isinstance(decoder, decoders.Sequence):
        return tokenizer.decode(ids, skip)
    raw = b""
    for token_id in ids:
        token = backend.id_to_token(token_id)
        if token is None or (skip and token in SPECIALS):
            continue
        byte = _BYTE.fullmatch(token)
        raw += bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    strips = decoder.decode(["▁a"]) == "a"
    return raw.removeprefix(b" " if strips else b"").decode(errors="replace")
