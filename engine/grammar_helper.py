"""The program of the helper process that compiles each grammar first (`GrammarTrial` starts it and says why).

Frames on stdin and stdout, each a length of four bytes and as much JSON: first the vocabulary and the limits, then one
request and one answer at a time. Nothing of Pagemill is imported, so that the process starts fast and stays small. CPU
time is limited by the kernel: its signal ends the process also in the middle of native code.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

LENGTH = struct.Struct("<I")


def read_frame(stream: BinaryIO) -> Any:
    """The next value; None where the other side has closed."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def write_frame(stream: BinaryIO, value: Any) -> None:
    body = json.dumps(value).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


class TrieSource:
    """What llguidance reads a vocabulary from: the bytes of each token, by id."""

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        # Only needed to force the tokens of text that is certain, which every grammar here turns off.
        return []


def make_trie(tokens: list[bytes], eos_token_id: int) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(TrieSource(tokens, eos_token_id)), eos_token=[eos_token_id]
    )


def compile_first(trie: llguidance.LLTokenizer, source: str, limits: llguidance.LLParserLimits) -> llguidance.LLMatcher:
    """A parser at the beginning of the text. Raises `ValueError` where there is none.

    The lexer is lazy: only with the first mask it shows that a grammar is too large, or matches nothing.
    """
    parser = llguidance.LLMatcher(trie, source, log_level=0, limits=limits)
    if not parser.is_error():
        parser.compute_bitmask()
    if parser.is_error():
        raise ValueError(parser.get_error())
    return parser


def lark_of(gbnf: str) -> str:
    """A grammar in llama.cpp's syntax as Lark. Raises `ValueError`."""
    try:
        return gbnf_to_lark(gbnf).removeprefix("%llguidance {}")
    except Exception as error:  # the converter's own, and whatever it trips over
        raise ValueError(f"it cannot be read as GBNF: {error}") from error


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    trie = make_trie(tokens, setup["eos_token_id"])
    limits = llguidance.LLParserLimits(**setup["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (request := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
        try:
            if "gbnf" in request:
                answer = {"lark": lark_of(request["gbnf"])}
            else:
                compile_first(trie, request["source"], limits)
                answer = {}
        except (ValueError, MemoryError) as error:
            answer = {"error": str(error) or "it takes too much memory"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, answer)


if __name__ == "__main__":
    main()
