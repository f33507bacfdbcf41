"""Many streaming clients of one gateway, of whom some stop reading: `python -m bench.gateway_load [--clients 200]`

Engine, gateway, server, a prober of /healthz and the clients are processes of their own. The engine's model is tiny and
random, and each step waits so long that every stream gets a token every `--step-ms`. `--stalled` clients ask for a lot
(eight choices with log-probabilities), so that buffers fill; in turns they read it, and do not. Told are the time
between reads of the others, what /healthz took, the gateway's memory, and who had the processors meanwhile.

The plain streams ask for token ids. Without them a token that is no text yet, being part of a character, has no frame,
and about half of a random model's tokens are such: the time between frames would be several steps by chance. The
clients' own lag (how much later than due a timer of theirs fires) stands beside the figures, since it is part of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from tests.adapters.sse_crowd import Crowd, crowd, percentile, request
from tests.chaos.model import make_model

from pagemill.ingest.embedded import EmbeddedServer

PLAIN = {"prompt": "a queue is", "ignore_eos": True, "stream": True, "flush_ms": 0, "token_ids": True}
MUCH = {**PLAIN, "n": 8, "logprobs": 20}
LAG_EVERY_S = 0.02


def begun(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    return output


class Watch:
    """Looks at this process and others meanwhile: lag of this one's timers, memory, shares of a processor."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._before = {name: _processor_s(process) for name, process in processes.items()}
        self._began = time.perf_counter()
        self._tasks = [asyncio.create_task(self._lag()), asyncio.create_task(self._memory())]
        self.lags: list[float] = []
        self.peak_mb = 0.0

    async def _lag(self) -> None:
        while True:
            due = time.perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.lags.append(time.perf_counter() - due)

    async def _memory(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._processes["gateway"].memory_info().rss / 1e6)
            await asyncio.sleep(0.2)

    def end(self) -> tuple[float, dict[str, float]]:
        """Seconds that it took, and the share of a processor that each process had."""
        for task in self._tasks:
            task.cancel()
        took = time.perf_counter() - self._began
        return took, {
            name: round((_processor_s(process) - self._before[name]) / took, 2)
            for name, process in self._processes.items()
        }


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def phase(
    port: int, processes: dict[str, psutil.Process], args: argparse.Namespace, stalled: int
) -> tuple[Crowd, dict[str, Any]]:
    """One crowd, and what was seen beside it."""
    tokens = {"max_tokens": args.tokens}
    plain, much = (request("/v1/completions", {**body, **tokens}) for body in (PLAIN, MUCH))
    watch = Watch(processes)
    seen = await crowd(
        port,
        plain,
        args.clients - args.stalled,
        much=much,
        greedy=args.stalled - stalled,
        deaf=stalled,
        ramp_s=args.ramp_s,
    )
    took, shares = watch.end()
    gaps, lags = seen.gaps, sorted(watch.lags)
    return seen, {
        "frames_s": round(sum(reader.frames for reader in seen.readers) / took),
        "gap_ms": {str(share): _ms(percentile(gaps, share)) for share in (0.5, 0.99, 0.999)},
        "gap_max_ms": _ms(gaps[-1]),
        "client_lag_ms": {"p99": _ms(percentile(lags, 0.99)), "max": _ms(lags[-1])},
        "rss_peak_mb": round(watch.peak_mb, 1),
        "cpu": shares,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def measure(args: argparse.Namespace, server: EmbeddedServer, folder: Path) -> dict[str, Any]:
    url = server.url
    timeout = ("--http-write-timeout-s", str(args.write_timeout_s))
    gateway = begun("pagemill", "gateway", "--redis-url", url, "--http-port", "0", "--log-level", "warning", *timeout)
    engine = begun("tests.adapters.crowd_engine", url, str(folder), str(args.step_ms))
    try:
        port = int(first_line(gateway).rpartition(":")[2])
        assert first_line(engine) == "ready\n"
        pids = {"gateway": gateway.pid, "engine": engine.pid, "server": server.pid, "clients": None}
        return rounds_of(args, port, {name: psutil.Process(pid) for name, pid in pids.items()})
    finally:
        end(gateway)
        end(engine)


def rounds_of(args: argparse.Namespace, port: int, processes: dict[str, psutil.Process]) -> dict[str, Any]:
    asyncio.run(crowd(port, request("/v1/completions", {**PLAIN, "max_tokens": 3}), args.clients))
    gateway = processes["gateway"]
    result: dict[str, Any] = {"rss_before_mb": round(gateway.memory_info().rss / 1e6, 1)}
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for stalled in (0, args.stalled):
            prober = begun("bench.health_probe", str(port))
            assert first_line(prober) == "asking\n"
            seen, figures = asyncio.run(phase(port, processes, args, stalled))
            health = sorted(json.loads(end(prober)))
            told = {"stalled": stalled, "cut": seen.cut, "whole": f"{seen.whole} of {len(seen.readers)}", **figures}
            told["healthz_ms"] = {"p99": _ms(percentile(health, 0.99)), "max": _ms(health[-1]), "asked": len(health)}
            rounds.append(told)
            if not args.json:
                print(json.dumps(told), flush=True)
    result["rss_after_mb"] = round(gateway.memory_info().rss / 1e6, 1)
    ratios = [
        bad["gap_ms"]["0.99"] / good["gap_ms"]["0.99"] for good, bad in zip(rounds[::2], rounds[1::2], strict=True)
    ]
    return {**result, "p99_gap_with_stalled_over_without": [round(ratio, 2) for ratio in ratios], "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description="a crowd of streaming clients of whom some stop reading")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--stalled", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=80.0, help="what each step of the engine waits")
    parser.add_argument("--ramp-s", type=float, default=2.0, help="time within which the clients come")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write-timeout-s", type=float, default=3.0, help="the gateway's http_write_timeout_s")
    parser.add_argument("--json", action="store_true", help="one object, nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        result = measure(args, server, make_model(Path(folder)))
    if args.json:
        print(json.dumps(result))
    else:
        print(json.dumps({name: value for name, value in result.items() if name != "rounds"}))


if __name__ == "__main__":
    main()
