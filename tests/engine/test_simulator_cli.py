"""`pagemill bench simulate` from the outside: tables, JSON, sweeps, plots and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill.adapters.cli.main import run

USAGE = 2


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "day.csv"
    rows = [f"{i * 200},{30 + 37 * i % 200},{5 + 11 * i % 60}" for i in range(40)]
    path.write_text("arrival_ms,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            status = run(["bench", "simulate", *map(str, arguments)])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_table_of_the_engine_and_its_twins(simulate: Any, azure: Path) -> None:
    flags = ("--arrivals", "backlog", "--pool-tokens", 2048, "--naive", "--max-model-len", 512)
    status, out, _ = simulate(azure, *flags)
    assert status == 0
    assert "day: 40 requests" in out and "arrivals backlog" in out
    for column in ("pagemill", "naive paged", "contiguous 512", "contiguous pow2", "contiguous exact"):
        assert column in out
    for row in ("running while others wait", "waste, life / end", "preemptions, per 1,000", "between tokens ms"):
        assert row in out


def test_json_lines(simulate: Any, azure: Path) -> None:
    status, out, _ = simulate(azure, "--json", "--pool-tokens", 2048, "--limit", 30, "--rate-scale", 5)
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["system"] for line in lines] == ["pagemill", "contiguous 291", "contiguous pow2", "contiguous exact"]
    assert all(line["finished"] == 30 and line["latency"]["ttft"]["p99"] > 0 for line in lines)
    assert lines[0]["settings"]["arrivals"] == "trace x 5"
    assert lines[0]["duration_s"] >= 29 * 0.2 / 5


def test_sweeps(simulate: Any, azure: Path) -> None:
    status, out, _ = simulate(
        azure, "--json", "--contiguous", "none", "--block-size", 8, 64, "--sweep", "rate-scale=1,9"
    )
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["block_size"], line["rate_scale"]) for line in lines] == [
        ("8", "1"),
        ("8", "9"),
        ("64", "1"),
        ("64", "9"),
    ]
    assert lines[0]["waste_life_percent"] < lines[2]["waste_life_percent"]
    assert lines[0]["duration_s"] > 5 * lines[1]["duration_s"]
    status, out, _ = simulate(azure, "--arrivals", "backlog", "--sweep", "pool_tokens=1024,4096", "--contiguous", "512")
    assert status == 0 and "x contig." in out and "prefix" not in out and " x " in out


def test_policies_and_refusals(simulate: Any, azure: Path) -> None:
    load = ("--arrivals", "backlog", "--pool-tokens", 512, "--max-tokens", "exact", "--contiguous", "none")
    status, out, _ = simulate(azure, *load, "--policy", "priority", "--classes", "20,80", "--max-waiting-requests", 30)
    assert status == 0 and "queue_full 10" in out and "priority 0, " in out and "priority 1, " in out
    status, out, _ = simulate(azure, *load, "--json", "--sweep", "admission=optimistic,reserve", "--ttl-ms", 60_000)
    assert status == 0
    optimistic, reserve = (json.loads(line) for line in out.splitlines())
    assert (optimistic["admission"], reserve["admission"]) == ("optimistic", "reserve")
    assert reserve["preemptions"] == 0 and reserve["settings"]["ttl_s"] == 60
    assert reserve["running_backlogged"] < optimistic["running_backlogged"]


def test_overload(simulate: Any, azure: Path, tmp_path: Path) -> None:
    flags = ("--overload", "--pool-tokens", 1024, "--ttl-ms", 3000, "--limit", 20)
    plot = tmp_path / "overload.svg"
    status, out, _ = simulate(azure, *flags, "--naive", "chunks", "--plot", plot)
    assert status == 0 and plot.read_bytes().startswith(b"<?xml")
    for title in ("between tokens ms", "a request's longest", "preempted", "refused,"):
        assert title in out
    for mode in ("plain", "optimistic", "reserve", "optimistic, deadline", "reserve, deadline", "naive twin"):
        assert out.count(f" {mode} ") == 3
        assert mode in plot.read_text()
    status, out, _ = simulate(azure, *flags, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(lines) == 15
    settings = {line["mode"]: line["settings"] for line in lines}
    assert settings["plain"]["forecast"] == "none" and settings["plain"]["ttl_s"] is None
    assert settings["reserve, deadline"]["admission"] == "reserve" and settings["reserve, deadline"]["ttl_s"] == 3
    rates = [float(line["settings"]["arrivals"].split()[-1]) for line in lines if line["mode"] == "plain"]
    assert [rate / rates[0] for rate in rates] == pytest.approx([1, 2, 4], rel=0.001)


def test_the_others_of_a_heavy_tenant(simulate: Any, tmp_path: Path) -> None:
    def client(name: str, rate: float) -> str:
        lengths = [10, 10, 10, 20, 20, 30, 30, 40, 40, 50]
        windows = [[start, rate, 1, "", 0, 0] for start in (0.0, 600.0)]
        fields = {"model": "m", "client": name, "arrivals": windows, "input_tokens": lengths, "output_tokens": lengths}
        return json.dumps(fields)

    path = tmp_path / "clients.jsonl"
    path.write_text("\n".join((client("a", 0.06), client("b", 0.02), client("c", 0.02))))
    flags = ("--contiguous", "none", "--max-num-seqs", 2, "--rate-scale", 40)
    sweeps = ("--sweep", "policy=fcfs,fair", "--sweep", "tenants=all,others")
    status, out, _ = simulate(path, *flags, "--sweep", "policy=fcfs,fair")
    assert status == 0 and "others' first" in out
    status, out, _ = simulate(path, *flags, *sweeps, "--json")
    everybody, others, fair, _ = (json.loads(line) for line in out.splitlines())
    assert [group["name"] for group in everybody["groups"]] == ["m/a", "2 others"]
    assert others["requests"] == sum(group["finished"] for group in everybody["groups"][1:])
    assert fair["groups"][1]["ttft"]["p99"] <= everybody["groups"][1]["ttft"]["p99"]
    status, out, _ = simulate(path, *flags, "--from-s", 600, "--json")
    assert 0.3 < json.loads(out)["requests"] / everybody["requests"] < 0.7


def test_times_of_another_trace(simulate: Any, azure: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"turns":[["h",20],["g",30]]}\n' * 50)
    status, out, _ = simulate(talk, "--times-of", azure, "--json", "--contiguous", "none")
    result = json.loads(out)
    assert status == 0 and result["settings"]["arrivals"] == "trace"
    assert result["requests"] == 40 and result["output_tokens"] == 40 * 30 and result["duration_s"] > 39 * 0.2
    assert simulate(talk, "--times-of", talk)[0] == 0  # that has no times either: a backlog


def test_a_changed_device(simulate: Any, azure: Path) -> None:
    slow = ("--fixed-us", 1_000_000, "--json", "--contiguous", "none", "--limit", 1)
    _, out, _ = simulate(azure, *slow)
    result = json.loads(out)
    assert result["duration_s"] == pytest.approx(result["steps"], rel=0.01)


@pytest.mark.parametrize(
    ("suffix", "head", "sweep"),
    [("png", b"\x89PNG", ()), ("svg", b"<?xml", ("--sweep", "block_size=8,16", "--sweep", "ttl_ms=none,640"))],
)
def test_plots(simulate: Any, azure: Path, tmp_path: Path, suffix: str, head: bytes, sweep: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{suffix}"
    assert simulate(azure, "--plot", path, "--limit", 10, *sweep)[0] == 0
    assert path.read_bytes().startswith(head)


def test_plots_without_matplotlib_are_refused_at_once(
    simulate: Any, azure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = simulate(azure, "--plot", tmp_path / "x.png")
    assert (status, out) == (USAGE, "") and "pip install 'pagemill[plots]'" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--plot", "x.pdf"), ".png or .svg"),
        (("--plot", "/nowhere/at/all/x.png"), "no folder /nowhere/at/all"),
        (("--sweep", "blocksize=1"), "did you mean"),
        (("--sweep", "block_size"), "needs values"),
        (("--sweep", "block_size=a,b"), "block_size must be a number, got 'a'"),
        (("--sweep", "prefix_caching=yes"), "prefix_caching is one of true, false"),
        (("--contiguous", "big"), "--contiguous takes"),
        (("--longest", "3"), "no request"),
        (("--max-tokens", "many"), "max_tokens must be a number"),
        (("--pool-tokens", "5"), "holds no block"),
        (("--rate-scale", "0"), "above 0"),
        (("--limit", "0"), "--limit"),
        (("--classes", "1,x"), "--classes must be a number"),
        (("--classes", "0,0"), "--classes takes"),
        (("--ttl-ms", "0"), "ttl must be above 0"),
        (("--from-s", "-1"), "--from-s must not be negative"),
        (("--from-s", "8"), "comes after 8 s"),
        (("--tenants", "others"), "one tenant only"),
        (("--overload", "--sweep", "policy=fcfs,fair"), "--overload runs its own table"),
        (("--overload", "--arrivals", "backlog"), "not as backlog"),
        (("--device", "abacus"), "invalid choice"),
    ],
)
def test_what_is_wrong_is_said(simulate: Any, azure: Path, flags: tuple[str, ...], message: str) -> None:
    if flags[0] == "--plot":
        pytest.importorskip("matplotlib")
    status, _, err = simulate(azure, *flags)
    assert status == USAGE
    assert message in err and "Traceback" not in err


def test_a_file_that_is_no_trace(simulate: Any, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    status, _, err = simulate(tmp_path / "x.csv")
    assert status == USAGE and "none of the traces" in err


def test_no_model_is_loaded() -> None:
    code = "import sys, pagemill.adapters.cli.simulate; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "False False"
