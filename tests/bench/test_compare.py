"""`bench.compare`: what runs, what is told of it, and that engines take turns."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from bench.compare import Engine, Run, engines, main, run, summary


def _options(*peers: str) -> argparse.Namespace:
    return argparse.Namespace(model="smollm2-135m", threads=1, set=[], peer=list(peers))


def test_peers_are_found_by_their_place() -> None:
    found = engines(_options("transformers", "vllm=/v/bin/python", "llama.cpp=/l/server,/m/model.gguf"))
    assert [engine.name for engine in found] == ["pagemill", "transformers", "vllm", "llama.cpp"]
    assert found[1].command[0] == sys.executable
    assert found[2].command[0] == "/v/bin/python"
    assert found[3].command[2:] == ("/l/server", "/m/model.gguf", "1")
    assert all(Path(engine.command[1]).is_file() for engine in found[1:])


@pytest.mark.parametrize("peer", ["vllm", "vllm=", "llama.cpp=/l/server", "ollama=/x", ""])
def test_a_peer_that_is_none_is_refused(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--peer", peer])
    assert refused.value.code == 2
    assert f"got {peer!r}" in capsys.readouterr().err


def test_a_run_is_read_and_a_failed_one_is_told(tmp_path: Path) -> None:
    told = json.dumps({"tokens_per_s": 12.5, "load_s": 0.5})
    engine = Engine("x", (sys.executable, "-c", f"print('noise'); print('{told}')"))
    found = run(engine, tmp_path / "w.jsonl", 1)
    assert (found.tokens_per_s, found.load_s) == (12.5, 0.5)
    assert found.probe_gb_s > 0.1
    assert 0 <= found.others_share <= 1
    with pytest.raises(RuntimeError, match=r"x failed on w:(\n.*)*no such model"):
        run(Engine("x", (sys.executable, "-c", "raise SystemExit('no such model')")), tmp_path / "w.jsonl", 1)


def test_ratios_are_of_neighbouring_runs() -> None:
    runs = []
    for ours, peer in ((100.0, 50.0), (40.0, 10.0), (90.0, 30.0)):
        runs += [Run("pagemill", ours, 1.0, 30.0, 0.0), Run("vllm", peer, 9.0, 31.0, 0.02)]
    first, second = summary("chat", runs)
    assert first.startswith("| chat | pagemill | 90.0 (40.0 - 100.0) | 1.0 | 30 (30 - 30) | 0.0% |")
    assert second.endswith("| 2.0% | 3.00 (2.00 - 4.00) |")
