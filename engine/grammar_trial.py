"""Every grammar is compiled in a helper process first, so that none can hang, exhaust or end the engine's own.

llguidance bounds most of its work, but not all: thirty `pattern`s under one `allOf` are intersected in time that
doubles with each, a `multipleOf` of five digits makes an automaton of hundreds of megabytes, and native code that
overflows its stack ends the process. None of that can be stopped in a thread. In the helper the kernel does it, by
limits on CPU time and address space; a lost helper is one refused request, and the next request starts another.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagemill.engine import grammar_helper
from pagemill.engine.errors import RequestError
from pagemill.engine.grammar_helper import read_frame, write_frame

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30


class GrammarTrial:
    """The helper of one vocabulary, started when it is first needed. Safe to use from several threads, one at a time.

    `tokens` are the bytes of each token, `limits` the arguments of `llguidance.LLParserLimits`.
    """

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int, limits: Mapping[str, Any]) -> None:
        self._setup = {
            "tokens": [token.decode("latin-1") for token in tokens],
            "eos_token_id": eos_token_id,
            "limits": dict(limits),
            "cpu_seconds": CPU_SECONDS,
            "memory_bytes": MEMORY_BYTES,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = _nothing

    def run(self, source: str) -> None:
        """Return where `source` compiles within the limits. Raises `ValueError` with the reason where it does not, and
        `engine_error` where there is no helper to try it."""
        self._ask({"source": source})

    def convert(self, gbnf: str) -> str:
        """A grammar in llama.cpp's syntax as Lark. Raises `ValueError`. The converter is slow, hence here."""
        lark: str = self._ask({"gbnf": gbnf})["lark"]
        return lark

    def _ask(self, request: dict[str, str]) -> Any:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._exchange(cast("subprocess.Popen[bytes]", self._process), request)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _exchange(self, process: subprocess.Popen[bytes], request: dict[str, str]) -> Any:
        try:
            write_frame(cast(BinaryIO, process.stdin), request)
            answer = read_frame(cast(BinaryIO, process.stdout))
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return answer
        status = process.wait()
        if status == -signal.SIGPROF:
            raise ValueError(f"it takes more than {CPU_SECONDS:g} s to compile; make it simpler")
        if status >= 0:  # no grammar does that
            raise RequestError("engine_error", f"the helper process that compiles grammars exited with status {status}")
        raise ValueError(
            f"compiling it ended the helper process with status {status}; {MEMORY_BYTES >> 20} MiB are allowed"
        )

    def _start(self) -> None:
        self._end()
        # -P: the folder of the program is not a place to import from, since its modules have everyday names.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(grammar_helper.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise RequestError(
                "engine_error", f"the helper process that compiles grammars cannot be started: {error}"
            ) from error
        self._end = weakref.finalize(self, _end, self._process)
        with contextlib.suppress(BrokenPipeError):  # the exchange that follows will tell
            write_frame(cast(BinaryIO, self._process.stdin), self._setup)


def _nothing() -> None:
    """The end of a helper that never was."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
