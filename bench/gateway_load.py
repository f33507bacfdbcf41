"""Many streaming clients of one gateway, of whom some stop reading: `python -m bench.gateway_load [--clients 200]`

Engine, gateway, server, a prober of /healthz and the clients are processes of their own. The engine's model is tiny and
random, and each step waits so long that every stream gets a token every `--step-ms`. `--stalled` clients ask for a lot
(eight choices with log-probabilities), so that buffers fill; in turns they read it, and do not. Told are the time
between reads of the others, what /healthz took, and the gateway's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
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

PLAIN = {"prompt": "a queue is", "ignore_eos": True, "stream": True, "flush_ms": 0}
MUCH = {**PLAIN, "n": 8, "logprobs": 20}
PROBE_EVERY_S = 0.05


def probe(port: int) -> None:
    """Ask /healthz again and again until told to end; print what it took, in seconds."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    took: list[float] = []
    while not told:
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        connection.close()
        took.append(time.perf_counter() - begun)
        time.sleep(max(0.0, PROBE_EVERY_S - took[-1]))
    print(json.dumps(took))


def begun(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    return output


async def phase(port: int, gateway: psutil.Process, args: argparse.Namespace, stalled: int) -> tuple[Crowd, float]:
    """One crowd, and the most memory that the gateway had meanwhile, MB."""
    peak = 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, gateway.memory_info().rss / 1e6)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    tokens = {"max_tokens": args.tokens}
    plain, much = (request("/v1/completions", {**body, **tokens}) for body in (PLAIN, MUCH))
    seen = await crowd(
        port,
        plain,
        args.clients - args.stalled,
        much=much,
        greedy=args.stalled - stalled,
        deaf=stalled,
        ramp_s=args.ramp_s,
    )
    watching.cancel()
    return seen, peak


def measure(args: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    timeout = ("--http-write-timeout-s", str(args.write_timeout_s))
    gateway = begun("pagemill", "gateway", "--redis-url", url, "--http-port", "0", "--log-level", "warning", *timeout)
    engine = begun("tests.adapters.crowd_engine", url, str(folder), str(args.step_ms))
    try:
        return rounds_of(args, engine, gateway)
    finally:
        end(gateway)
        end(engine)


def rounds_of(
    args: argparse.Namespace, engine: subprocess.Popen[str], gateway: subprocess.Popen[str]
) -> dict[str, Any]:
    port = int(first_line(gateway).rpartition(":")[2])
    assert first_line(engine) == "ready\n"
    process = psutil.Process(gateway.pid)
    asyncio.run(crowd(port, request("/v1/completions", {**PLAIN, "max_tokens": 3}), args.clients))
    result: dict[str, Any] = {"rss_before_mb": round(process.memory_info().rss / 1e6, 1)}
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for stalled in (0, args.stalled):
            prober = begun("bench.gateway_load", "--probe", str(port))
            cpu = process.cpu_times()
            started = time.perf_counter()
            seen, peak = asyncio.run(phase(port, process, args, stalled))
            took = time.perf_counter() - started
            used = process.cpu_times()
            health = sorted(json.loads(end(prober)))
            gaps = seen.gaps
            rounds.append(
                {
                    "stalled": stalled,
                    "cut": seen.cut,
                    "whole": f"{seen.whole} of {len(seen.readers)}",
                    "frames_s": round(sum(reader.frames for reader in seen.readers) / took),
                    "gap_ms": {str(share): round(1000 * percentile(gaps, share), 1) for share in (0.5, 0.99, 0.999)},
                    "gap_max_ms": round(1000 * gaps[-1], 1),
                    "healthz_ms": {
                        "p99": round(1000 * percentile(health, 0.99), 1),
                        "max": round(1000 * health[-1], 1),
                    },
                    "healthz_asked": len(health),
                    "rss_peak_mb": round(peak, 1),
                    "gateway_cpu": round((used.user + used.system - cpu.user - cpu.system) / took, 2),
                }
            )
            if not args.json:
                print(json.dumps(rounds[-1]), flush=True)
    result["rss_after_mb"] = round(process.memory_info().rss / 1e6, 1)
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
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args.probe)
        return
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        result = measure(args, server.url, make_model(Path(folder)))
    if args.json:
        print(json.dumps(result))
    else:
        print(json.dumps({name: value for name, value in result.items() if name != "rounds"}))


if __name__ == "__main__":
    main()
