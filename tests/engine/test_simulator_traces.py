"""Reading traces: every format, what is no trace, and tokens that are equal exactly where the trace says so."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.arrivals import Arrivals, Feed
from pagemill.engine.simulator.tokens import END_TOKEN, TokenRuns, cut_runs, join_runs
from pagemill.engine.simulator.trace import Trace
from pagemill.engine.simulator.trace_files import read_trace

RUNS = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 9)), max_size=8)


def write(folder: Path, name: str, text: str | list[Any]) -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else "".join(json.dumps(row) + "\n" for row in text))
    return path


def prompt(trace: Trace, index: int) -> list[int]:
    return list(TokenRuns(trace.requests[index].prompt))


def output(trace: Trace, index: int) -> list[int]:
    return list(TokenRuns(trace.requests[index].output))


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- runs of tokens --------------------------------------------------------------------------------------------------


@given(RUNS, st.integers(-70, 70), st.integers(-70, 70), st.integers(1, 3))
def test_runs_read_like_the_list_they_stand_for(runs: list[tuple[int, int]], start: int, stop: int, step: int) -> None:
    expected = [first + i for first, count in runs for i in range(count)]
    for tokens in (TokenRuns(runs), TokenRuns(join_runs(runs))):
        assert list(tokens) == expected
        assert len(tokens) == len(expected)
        assert tokens[start:stop] == expected[start:stop]
        assert tokens[start:stop:step] == expected[start:stop:step]
        assert [tokens[i] for i in range(-len(expected), len(expected))] == expected * 2
        with pytest.raises(IndexError):
            tokens[len(expected)]
    low, high = max(0, start), max(0, stop)
    assert list(TokenRuns(cut_runs(runs, low, high))) == expected[low:high]


# -- formats ---------------------------------------------------------------------------------------------------------


def test_azure(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "arrival_ms,prompt_tokens,output_tokens\n500,3,2\n2000,4,1\n2500,0,7\n1000,5,6\n")
    trace = read_trace(path)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 3, 2),
        (0.5, 5, 6),
        (1.5, 4, 1),
    ]
    assert trace.dropped == 1 and trace.has_times and not trace.has_sessions and trace.longest == 11
    everything = [token for i in range(3) for token in prompt(trace, i) + output(trace, i)]
    assert len(set(everything)) == len(everything) == 21 and END_TOKEN not in everything


def test_azure_as_published(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = read_trace(write(tmp_path, "a.csv", "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n" + rows))
    assert [r.prompt_tokens for r in trace.requests] == [374, 396]
    assert trace.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-4)


def test_a_trace_can_be_entered_later(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "arrival_ms,prompt_tokens,output_tokens\n9000,7,1\n1000,5,1\n4000,6,1\n")
    later = read_trace(path, from_s=3.0).requests
    assert [(r.arrival_s, r.prompt_tokens) for r in later] == [(0.0, 6), (5.0, 7)]
    with pytest.raises(ConfigError, match="comes after 9 s"):
        read_trace(path, from_s=9.0)
    talks = write(tmp_path, "t.jsonl", '{"turns": [["h", 9], ["g", 9]]}\n')
    with pytest.raises(ConfigError, match="no times"):
        read_trace(talks, from_s=1.0)


def test_burstgpt_drops_failed_requests(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Log Type\n"
    rows = "5,ChatGPT,472,18,Conversation log\n45,GPT-4,0,0,Conversation log\n45,ChatGPT,1087,230,API log\n"
    trace = read_trace(write(tmp_path, "b.csv", head + rows))
    assert [(r.arrival_s, r.prompt_tokens) for r in trace.requests] == [(0, 472), (40, 1087)]
    assert trace.dropped == 1


@pytest.mark.parametrize("zipped", [False, True])
def test_mooncake_shares_exactly_the_equal_blocks(tmp_path: Path, zipped: bool) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 20]},
        {"timestamp": 1500, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 2500, "input_length": 1050, "output_length": 5, "hash_ids": [7, 8, 20]},
    ]
    path = write(tmp_path, "m.jsonl", rows)
    if zipped:
        path = tmp_path / "m.jsonl.gz"
        path.write_bytes(gzip.compress((tmp_path / "m.jsonl").read_bytes()))
    trace = read_trace(path)
    assert trace.name == "m"
    assert [r.arrival_s for r in trace.requests] == [0, 0.5, 1.5]
    a, b, c = (prompt(trace, i) for i in range(3))
    assert (len(a), len(b), len(c)) == (1100, 1500, 1050)
    assert shared(a, b) == 1024 and shared(a, c) == 1050
    assert not set(output(trace, 0)) & set(a + b + c + output(trace, 1))


def test_chains_share_as_far_as_their_ids_agree(tmp_path: Path) -> None:
    rows = [
        {"session": "s", "input_length": 6, "output_length": 4, "token_chain_rle": [[0, 10]]},
        {"session": "s", "input_length": 13, "output_length": 2, "token_chain_rle": [[0, 10], [10, 2], [90, 3]]},
        {"session": "t", "input_length": 9, "output_length": 1, "token_chain_rle": [[0, 4], [40, 6]]},
    ]
    trace = read_trace(write(tmp_path, "c.jsonl", rows))
    assert not trace.has_times and [r.previous for r in trace.requests] == [None, 0, None]
    first, second, third = (prompt(trace, i) for i in range(3))
    assert shared(first + output(trace, 0), second) == 10  # the answer is part of the next call
    assert shared(first, third) == 4


def test_conversations(tmp_path: Path) -> None:
    rows = [
        {"turns": [["g", 9], ["h", 10], ["g", 20], ["h", 5], ["g", 30]]},
        {"turns": [["s", 4], ["h", 3], ["g", 50], ["h", 6], ["g", 7]]},
        {"turns": [["h", 2]]},
    ]
    path = write(tmp_path, "s.jsonl", rows)
    trace = read_trace(path, turns="first")
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(10, 20)]  # 3 tokens: a cut-off
    trace = read_trace(path, turns="all")
    assert [(r.prompt_tokens, r.output_tokens, r.previous) for r in trace.requests] == [
        (10, 20, None),
        (35, 30, 0),
        (3, 50, None),
        (59, 7, 2),
    ]
    assert shared(prompt(trace, 0) + output(trace, 0), prompt(trace, 1)) == 30
    assert not set(prompt(trace, 1)) & set(prompt(trace, 3))


def test_servegen_draws_each_client_from_its_own_fit(tmp_path: Path) -> None:
    def client(number: int, rate: float, family: str, shape: float, scale: float, longest: int) -> dict[str, Any]:
        quantiles = [1, 2, 3, 10, 50, 90, 95, 98, 99, longest]
        return {
            "model": "m",
            "client": number,
            "arrivals": [[0, rate, 1.0, family, shape, scale], [600, rate, 1.0, family, shape, scale]],
            "input_tokens": quantiles,
            "output_tokens": quantiles,
        }

    rows = [
        client(0, 3.0, "Gamma", 0.5, 2 / 3, 100),
        client(1, 1.0, "Weibull", 1.0, 1.0, 200),
        client(2, 1.0, "", 0, 0, 9),
    ]
    path = write(tmp_path, "g.jsonl", [*rows, {**rows[0], "model": "other"}])
    trace = read_trace(path, limit=5000, seed=1)
    assert len(trace.requests) == 5000 and trace == read_trace(path, limit=5000, seed=1)
    assert trace != read_trace(path, limit=5000, seed=2)
    counts = [sum(r.tenant == f"m/{i}" for r in trace.requests) for i in range(3)]
    assert counts[0] == pytest.approx(3000, rel=0.15) and counts[1] == pytest.approx(1000, rel=0.15)
    times = [r.arrival_s or 0.0 for r in trace.requests]
    assert times == sorted(times) and times[-1] == pytest.approx(1000, rel=0.15)
    lengths = sorted(r.prompt_tokens for r in trace.requests if r.tenant == "m/0")
    assert lengths[len(lengths) // 2] == pytest.approx(50, rel=0.1)
    later = read_trace(path, limit=1000, seed=1, from_s=700.0).requests
    sent = [(r.tenant, r.prompt_tokens, r.output_tokens) for r in trace.requests]
    begin = sum((r.arrival_s or 0.0) < 699 for r in trace.requests)  # the first request of all came within a second
    found = sent.index((later[0].tenant, later[0].prompt_tokens, later[0].output_tokens), begin)
    assert [(r.tenant, r.prompt_tokens, r.output_tokens) for r in later] == sent[found : found + 1000]
    assert later[0].arrival_s == 0.0
    with pytest.raises(ConfigError, match=r"no clients of 'x'.*it has m, other"):
        read_trace(path, clients="x")


BAD = [
    ("", "is empty"),
    ("\n\n", "is empty"),
    ("a,b\n1,2\n", "none of the traces"),
    ("[1]\n", "is empty"),
    ("[1]\n[2]\n", "none of the traces"),
    ('{"x": 1}\n', "none of the traces"),
    ("arrival_ms,prompt_tokens,output_tokens\n", "is empty"),
    ("arrival_ms,prompt_tokens,output_tokens\n1,2\n", ":2 has another number of columns"),
    ("arrival_ms,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n", ":3 is not a row"),
    ("arrival_ms,prompt_tokens,output_tokens\n1,-2,3\n", ":2 is not a row.*negative"),
    ("arrival_ms,prompt_tokens,output_tokens\nnan,2,3\n", ":2 is not a row"),
    ("arrival_ms,prompt_tokens,output_tokens\n1,3000000000,3\n", "distinct tokens"),
    ("arrival_ms,prompt_tokens,output_tokens\n1,0,3\n", "holds no request"),
    ('{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n', "1 hash_ids for 513 tokens"),
    ('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n{"timesta', ":2 is not JSON"),
    ('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n[]\n', ":2 is not a row"),
    ('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":["a"]}\n', ":1 is not a row"),
    ('{"input_length":5,"output_length":1,"token_chain_rle":[[0,5]]}\n', "another number of tokens"),
    ('{"turns":[["h",5],["g"]]}\n', ":1 is not a row"),
    ('{"turns":[["h",5]]}\n', "holds no request"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, "bad", text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(ConfigError, match="directory"):
        read_trace(tmp_path)
    binary = tmp_path / "x.bin"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(ConfigError, match="not text"):
        read_trace(binary)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"arrival_ms,prompt_tokens,output_tokens\n" + b"1,2,3\n" * 999)[:-12])
    with pytest.raises(ConfigError, match="not text"):
        read_trace(cut)


# -- cuts and arrivals -----------------------------------------------------------------------------------------------


@pytest.fixture
def sessions(tmp_path: Path) -> Trace:
    rows = [{"turns": [["h", 10], ["g", 20], ["h", 5], ["g", 30]]} for _ in range(4)]
    return read_trace(write(tmp_path, "s.jsonl", rows), turns="all")


def test_a_shortened_trace_keeps_its_sessions(sessions: Trace) -> None:
    short = sessions.shortened(limit=3)
    assert [r.previous for r in short.requests] == [None, 0, None]
    fitting = sessions.shortened(longest=40, limit=3)
    assert [(r.prompt_tokens, r.previous) for r in fitting.requests] == [(10, None)] * 3


def test_sessions_keep_together_when_others_are_left_out(tmp_path: Path) -> None:
    rows = [{"turns": [["h", size], ["g", 20], ["h", 5], ["g", 30]]} for size in (100, 10, 10)]
    trace = read_trace(write(tmp_path, "s.jsonl", rows), turns="all").shortened(longest=70)
    assert [(r.prompt_tokens, r.previous) for r in trace.requests] == [(10, None), (35, 0), (10, None), (35, 2)]


def order(feed: Feed, trace: Trace, took: float) -> list[tuple[float, int]]:
    """Who was submitted when, if every answer took `took` seconds and all were answered at once."""
    now, submitted, running = 0.0, [], []
    while True:
        while (arrival := feed.take(now)) is not None:
            submitted.append(arrival)
            running.append((arrival[0] + took, arrival[1]))
        coming = [time for time, _ in running] + ([feed.next_time] if feed.next_time is not None else [])
        if not coming:
            return submitted
        now = min(coming)
        for ended in sorted(item for item in running if item[0] <= now):
            running.remove(ended)
            feed.ended(ended[1], now)


def test_sessions_call_one_after_the_other(sessions: Trace) -> None:
    arrived = order(Feed(sessions, Arrivals(mode="sessions", sessions=2)), sessions, 1.0)
    assert arrived == [(0, 0), (0, 2), (1, 1), (1, 3), (2, 4), (2, 6), (3, 5), (3, 7)]


def test_backlog_knows_no_sessions(sessions: Trace) -> None:
    arrived = order(Feed(sessions, Arrivals(mode="backlog")), sessions, 1.0)
    assert arrived == [(0, i) for i in range(8)]


def test_recorded_times_are_scaled_and_wait_for_the_session(sessions: Trace) -> None:
    trace = sessions.arriving([0, 1, 2, 20, 4, 5, 6, 7])
    arrived = {i: t for t, i in order(Feed(trace, Arrivals(mode="trace", rate_scale=2)), trace, 3.0)}
    assert arrived == {0: 0, 1: 3, 2: 1, 3: 10, 4: 2, 5: 5, 6: 3, 7: 6}


def test_poisson_starts_sessions_at_the_rate(sessions: Trace) -> None:
    many = Trace("many", sessions.requests[:1] * 4000)
    times = [time for time, _ in order(Feed(many, Arrivals(mode="poisson", rate=8)), many, 0.0)]
    assert times[-1] == pytest.approx(500, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 0.125 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_arrivals_that_make_no_sense(sessions: Trace) -> None:
    with pytest.raises(ConfigError, match="no times"):
        Feed(sessions, Arrivals(mode="trace"))
    for bad in ({"rate": 0.0}, {"rate_scale": -1.0}, {"sessions": 0}, {"rate": float("nan")}):
        with pytest.raises(ConfigError):
            Arrivals(mode="poisson", **bad)  # type: ignore[arg-type]
