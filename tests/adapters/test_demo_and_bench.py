"""`pagemill demo` from start to end, and what `bench offline` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.adapters.processes import SMALL, environment, pagemill

ROOT = Path(__file__).resolve().parents[2]
KEYS = (
    *("output_tokens", "wall_s", "tokens_per_s", "load_s"),
    *("peak_rss_mb", "preemptions", "prefix_hit_tokens", "waste_percent"),
)


def test_the_demo_shows_the_product_and_exits_cleanly(tmp_path: Path) -> None:
    ran = pagemill("demo", "--chats", "3", *SMALL, "--num-blocks-override=40", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for label in ("[1]", "[2]", "[3]", "[chat 1]", "[chat 3]", "[http]"):
        assert f"s  {label} " in ran.stdout, "every request's deltas are shown"
    assert "7 of 7" in ran.stdout
    rows = {row[1].strip(): row[2] for row in (line.split("│") for line in ran.stdout.splitlines()) if len(row) == 4}
    assert int(rows["prefix-hit tokens"].split()[0]) > 100, "the chats share their system prompt"
    assert int(rows["blocks shared, peak"]) > 5
    assert 0 < float(rows["KV waste"].split()[0]) < 50
    assert float(rows["output tokens/s"].split()[0]) > 0
    assert rows["blocks in use now"].split()[0] == "0"
    assert not list(tmp_path.glob("pagemill-valkey-*")), "the server's folder is gone"


def test_bench_prints_one_object_a_file(tmp_path: Path) -> None:
    shared = [[*range(400, 464), number] for number in range(500, 504)]
    for name, rows in (("one", [[400, 401, 402]]), ("shared", shared)):
        lines = (json.dumps({"prompt_token_ids": row, "max_tokens": 5}) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    files = [option for name in ("one", "shared") for option in ("--workload", str(tmp_path / f"{name}.jsonl"))]
    ran = pagemill("bench", "offline", *files, "--json", *SMALL)
    assert ran.returncode == 0, ran.stderr
    one, four = (json.loads(line) for line in ran.stdout.splitlines())
    assert all(key in result for result in (one, four) for key in KEYS)
    assert (one["output_tokens"], four["output_tokens"]) == (5, 20), "end-of-sequence is ignored"
    assert (one["prefix_hit_tokens"], four["prefix_hit_tokens"]) == (0, 3 * 64)
    assert four["num_blocks"] == 256 and four["peak_rss_mb"] > 100


def test_the_offline_example_runs() -> None:
    example = str(ROOT / "examples" / "offline.py")
    one_core = "import os, runpy, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    ran = subprocess.run(
        [sys.executable, "-c", f"{one_core}runpy.run_path({example!r}, run_name='__main__')"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("GENERATED: ") == 3
