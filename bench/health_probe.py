"""Ask a gateway's /healthz again and again: `python -m bench.health_probe PORT`, ended by SIGTERM.

A process of its own that imports next to nothing, so that what it needs to start does not disturb what it measures.
Says "asking" once it has had an answer; at its end, on one line, the seconds that each answer took, as JSON.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import time

EVERY_S = 0.02


def ask(port: int) -> float:
    """Seconds from a connection to the whole answer."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
    finally:
        connection.close()
    return time.perf_counter() - begun


def main() -> None:
    port = int(sys.argv[1])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    ask(port)
    print("asking", flush=True)
    took: list[float] = []
    while not told:
        took.append(ask(port))
        time.sleep(max(0.0, EVERY_S - took[-1]))
    print(json.dumps(took))


if __name__ == "__main__":
    main()
