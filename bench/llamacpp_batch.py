"""A workload through llama.cpp's server, for `bench.compare`: `llamacpp_batch.py SERVER MODEL.gguf THREADS FILE.jsonl`

The server runs on a free loopback port with 32 slots over one shared KV cache; all requests are sent at once. Prints
what `pagemill bench offline` prints, as far as it applies.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_OPTIONS = ("-np", "32", "-c", "65536", "-kvu", "-b", "2048", "-ub", "512", "-fa", "on", "--host", "127.0.0.1")
_START_S = 60.0


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server has loaded its model."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            call(f"{url}/health")
            return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama.cpp's server did not start") from None
            time.sleep(0.1)


def main(program: str, model: str, threads: str, *files: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    begun = time.perf_counter()
    command = [program, "-m", model, "-t", threads, "--port", port, *_OPTIONS]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(url, server)
        load = time.perf_counter() - begun
        for file in files:
            rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]

            def one(row: dict[str, Any]) -> int:
                body = {"prompt": row["prompt_token_ids"], "n_predict": row["max_tokens"], "cache_prompt": True}
                answer = call(f"{url}/completion", body | {"ignore_eos": True, "temperature": 0})
                return int(answer["tokens_predicted"])

            start = time.perf_counter()
            with ThreadPoolExecutor(len(rows)) as pool:
                count = sum(pool.map(one, rows))
            wall = time.perf_counter() - start
            result = {"engine": "llama.cpp", "workload": Path(file).stem, "output_tokens": count}
            result |= {"wall_s": round(wall, 3), "tokens_per_s": round(count / wall, 1), "load_s": round(load, 3)}
            print(json.dumps(result), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
