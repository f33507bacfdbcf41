"""What a transcript keeps of log-probabilities."""

from __future__ import annotations

import gc
from typing import Any

import orjson

from pagemill.ingest.events import Transcript


def entry(number: int) -> dict[str, Any]:
    top = [{"token_id": other, "token": "é", "logprob": None, "bytes": [195, 169]} for other in range(20)]
    return {"token_id": number, "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}


def delta(seq: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"seq": seq, "attempt": 1, "type": "delta", "index": 0}
    return {**head, "token_ids": [one["token_id"] for one in entries], "text": "a" * len(entries), "logprobs": entries}


def test_log_probabilities_come_back_and_are_no_work_for_the_garbage_collector() -> None:
    entries = [entry(number) for number in range(50)]
    transcript = Transcript.of([delta(1, entries[:20]), delta(2, entries[20:])])
    (choice,) = transcript.result()
    assert choice["logprobs"] == entries == transcript.choice(0).logprobs
    assert orjson.loads(transcript.result_json()) == transcript.result()
    kept = transcript.choice(0).logprob_entries
    assert kept is not None and not any(gc.is_tracked(one) for one in kept)


def test_what_is_taken_back_has_no_log_probabilities_left() -> None:
    entries = [entry(number) for number in range(5)]
    transcript = Transcript.of([delta(1, entries[:2]), delta(2, entries[2:])])
    transcript.add({"seq": 3, "attempt": 2, "type": "rewind", "index": 0, "to_offset": 2, "to_text_offset": 2})
    assert transcript.choice(0).logprobs == entries[:2]


def test_without_them_there_is_no_list() -> None:
    transcript = Transcript.of([{**delta(1, [entry(1)]), "logprobs": None}])
    assert "logprobs" not in transcript.result()[0]
    assert transcript.choice(0).logprobs is None
