"""What a request's choices have told their readers, as its record keeps it: whether a second run differs.

The stream of events may lose its end while the record does not. The engine that goes on then writes the lost events
anew, and compares: the record has how many tokens each choice had told, and the chain over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pagemill.ingest.events import ChoiceTranscript


@dataclass(frozen=True, slots=True)
class Told:
    """`count` tokens of a choice, and the `chain` over them."""

    count: int
    chain: str


def write_told(choices: Iterable[ChoiceTranscript], untold: Mapping[int, Told]) -> str:
    """`<tokens> <chain>` for each choice, with commas between; of those that are `untold` what had been told before."""
    words = [f"{len(choice.token_ids)} {choice.chain}" for choice in choices]
    for index, told in untold.items():
        words[index] = f"{told.count} {told.chain}"
    return ",".join(words)


def read_told(text: str) -> list[Told]:
    """By index. What cannot be read says nothing."""
    found = []
    for part in text.split(",") if text else ():
        count, _, chain = part.partition(" ")
        if not count.isdecimal():
            return []
        found.append(Told(int(count), chain))
    return found
