"""The engine for asyncio: one thread steps the device, the event loop submits and receives.

The step thread owns the core; nobody else touches it. Requests and aborts reach it through an inbox that it empties
between steps, increments reach the event loop in one callback per step. What the loop wants to know about the pool it
reads from the snapshot that the thread leaves behind after each step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill.engine.acceptance import Acceptance, QueueCaps
from pagemill.engine.assembly import EngineInfo, EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineDeadError, RequestError
from pagemill.engine.forecast import Outlook
from pagemill.engine.loader import Progress, no_progress
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.policy import Backlog, make_queue
from pagemill.engine.prompt import Prompt, make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_statistics import SchedulerStatistics

Sink = Callable[[SequenceOutput], None]

IDLE_CHECK_S = 1.0
OUTLOOK_S = 0.1  # how often it is worked out when those who wait will start
OUTLOOK_SHARE = 0.005  # of the step thread's time, at most: beside kernels the code has gone from the caches each time
MAX_OUTLOOK_S = 1.0


@dataclass(slots=True)
class _Live:
    """What the event loop remembers of a live request. `blocks`: its need while it has not started."""

    sink: Sink
    blocks: int
    seats: int
    request: Request
    prompt_tokens: int
    waits: bool = True
    aborted: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Pace:
    """What is known of an engine's steps. `tokens`: of the step under way; `largest`: of the largest that it has got
    through, `longest_s`: seconds of the longest one; both 0 before the first."""

    tokens: int = 0
    largest: int = 0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Submission:
    request: Request
    resumed: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    error: RequestError | None


def outlook_pause(took_s: float) -> float:
    """Seconds until the outlook is worked out again, after so many of the processor's for the last one."""
    return min(max(OUTLOOK_S, took_s / OUTLOOK_SHARE), MAX_OUTLOOK_S)


class AsyncEngine:
    """Submit requests from the event loop, get increments on it. Made by `create` inside a running loop."""

    def __init__(self, parts: EngineParts, loop: asyncio.AbstractEventLoop) -> None:
        self._parts = parts
        self._core = parts.core
        self._loop = loop
        self._live: dict[str, _Live] = {}
        self._pending_blocks = 0
        self._seats = 0
        caps = QueueCaps(parts.config.max_waiting_requests, parts.config.max_waiting_prompt_tokens)
        self._acceptance = Acceptance(caps)
        self._outlook: Outlook | None = None
        self._waiting = make_queue(parts.config.scheduling_policy, time.monotonic)  # as the scheduler's, for forecasts
        self._room = asyncio.Event()
        self._room.set()
        self._wake = threading.Condition()
        self._inbox: deque[_Submission | _Abort] = deque()
        self._stopping = False
        self._statistics = parts.core.scheduler.statistics()
        self._output_tokens = 0
        self._turns = 0
        self._largest_step = 0
        self._longest_step_s = 0.0
        self._asleep = False
        self._failure: EngineDeadError | None = None
        self._dead = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-step", daemon=True)
        self._thread.start()

    @classmethod
    async def create(cls, config: EngineConfig, progress: Progress = no_progress) -> AsyncEngine:
        """Load the model off the loop and start the step thread. Raises `ConfigError`."""
        parts = await asyncio.to_thread(build, config, progress)
        return cls(parts, asyncio.get_running_loop())

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    async def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tenant: str = "default",
        cache_salt: str = "",
        priority: int = 1,
        seed: int | None = None,
    ) -> Request:
        """Tokenise off the loop and check. Raises `RequestError` for whatever this engine can never serve."""

        def work() -> Request:
            return make_request(
                request_id,
                prompt,
                params,
                self._parts.limits,
                self._parts.tokenizer,
                tenant=tenant,
                cache_salt=cache_salt,
                priority=priority,
                seed=seed,
                compiler=self._parts.compiler,
            )

        return await asyncio.to_thread(work)

    def submit(
        self,
        request: Request,
        sink: Sink,
        resumed: Sequence[Sequence[int]] = (),
        *,
        time_left_s: float | None = None,
    ) -> None:
        """Hand a prepared request to the step thread. `sink` gets its increments on the event loop, the last one
        `final`. `resumed`: what each of its choices has told already; generation goes on from there. `time_left_s`:
        until its deadline.

        Raises `duplicate_id` while the id is live, `queue_full` past the caps, `deadline_unreachable` where those who
        wait before it take too long, `EngineDeadError` after a device failure.
        """
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._live:
            raise RequestError("duplicate_id", f"request {request.request_id} is running already", param="id")
        blocks = -(-request.num_tokens // self.info.block_size)
        tokens = request.num_tokens
        request.arrived_at = time.monotonic()
        if any(resumed):
            self._acceptance.count(tokens)
        else:
            ahead = self._waiting.ahead_of(request) if self._outlook is not None else None
            self._acceptance.accept(tokens, outlook=self._outlook, ahead=ahead, time_left_s=time_left_s)
        self._waiting.add(request)
        self._live[request.request_id] = _Live(sink, blocks, request.params.num_sequences, request, tokens)
        self._pending_blocks += blocks
        self._seats += request.params.num_sequences
        self._update_room()
        self._send(_Submission(request, resumed))

    def abort(self, request_id: str, error: RequestError | None = None) -> None:
        """End a request within one step, as "cancelled", or as "error" with the error given. Unknown ids: no-op."""
        live = self._live.get(request_id)
        if live is not None:
            live.aborted = True
            self._send(_Abort(request_id, error))

    async def wait_until_gone(self, request_id: str) -> None:
        """Return once an aborted request of this id has ended, so that the id can be submitted again."""
        live = self._live.get(request_id)
        if live is not None and live.aborted:
            await live.gone.wait()

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return len(self._live)

    def has_room(self) -> bool:
        """Whether one more request could start about now: a free seat, and what waits here already fits the pool."""
        if not self._live:
            return self._failure is None
        free = self._statistics.cache.pool.free - self._statistics.cache.promised_blocks
        return self._failure is None and self._seats < self._parts.limits.max_num_seqs and self._pending_blocks < free

    async def wait_for_room(self) -> None:
        """Return once `has_room`. Raises `EngineDeadError` after a device failure."""
        while not self.has_room():
            if self._failure is not None:
                raise self._failure
            self._room.clear()
            await self._room.wait()

    async def wait_for_death(self) -> EngineDeadError:
        """Return the failure when the device has failed; for ever otherwise."""
        await self._dead.wait()
        assert self._failure is not None
        return self._failure

    def statistics(self) -> SchedulerStatistics:
        """The scheduler's and the pool's figures as of the last step."""
        return self._statistics

    @property
    def threads(self) -> int:
        """Threads that compute at present: fewer than the setting while a neighbour keeps cores busy."""
        return self._parts.threads()

    @property
    def output_tokens(self) -> int:
        """Tokens generated since the start."""
        return self._output_tokens

    def pool_map(self, cells: int) -> tuple[str, str]:
        """See `BlockPool.map`."""
        return self._core.scheduler.cache.pool.map(cells)

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether the pool still has the block of this name. From any thread; the next step may change it."""
        return self._core.scheduler.cache.pool.lookup(block_hash) is not None

    @property
    def pulse(self) -> tuple[int, bool]:
        """How many turns the step loop has made, and whether it sleeps because there is nothing to do. A loop that is
        awake and makes no turn hangs in a step."""
        return self._turns, self._asleep

    @property
    def pace(self) -> Pace:
        """How large and how long its steps are."""
        return Pace(self._core.step_tokens, self._largest_step, self._longest_step_s)

    @property
    def backlog(self) -> Backlog:
        """What was accepted and has not started."""
        return self._acceptance.backlog

    def outlook(self) -> Outlook | None:
        """When those who wait, or come to wait now, should start. None: nothing is running, or it is not known yet."""
        return self._outlook if self._live else None

    async def check(self) -> None:
        """Assert every invariant. Only while nothing is live."""
        assert not self._live, "check() wants an idle engine"
        self._core.check()

    async def stop(self) -> None:
        """End the step thread after the step in flight. Live requests get no further increment."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # -- the step thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        core = self._core
        checked = True
        outlook, outlook_at = None, 0.0
        try:
            while True:
                with self._wake:
                    idle = not self._inbox and not core.has_requests and not self._stopping
                    self._turns += 1
                    if idle:
                        self._asleep = True
                        self._wake.wait(timeout=None if checked else IDLE_CHECK_S)
                        self._asleep = False
                        self._turns += 1
                        idle = not self._inbox and not self._stopping
                    if self._stopping:
                        return
                    inbox = list(self._inbox)
                    self._inbox.clear()
                if idle:
                    # Nothing came for a while: the time to notice a leaked block, at nobody's cost.
                    core.check()
                    checked = True
                    continue
                checked = False
                outputs: list[SequenceOutput] = []
                for message in inbox:
                    if isinstance(message, _Submission):
                        outputs += core.add(message.request, message.resumed)
                    else:
                        outputs += core.abort(message.request_id, message.error)
                if core.has_requests:
                    began = time.monotonic()
                    outputs += core.step()
                    self._longest_step_s = max(self._longest_step_s, time.monotonic() - began)
                    self._largest_step = max(self._largest_step, core.step_tokens)
                if outlook is None or time.monotonic() >= outlook_at:
                    took_s = -time.thread_time()
                    outlook = core.scheduler.outlook()
                    took_s += time.thread_time()
                    outlook_at = time.monotonic() + outlook_pause(took_s)
                self._post(self._deliver, outputs, core.scheduler.statistics(), outlook)
        except BaseException as exception:
            failure = EngineDeadError(f"the engine's step failed: {type(exception).__name__}: {exception}")
            failure.__cause__ = exception
            self._post(self._die, failure)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    # -- the event loop's side -----------------------------------------------------------------------------------

    def _send(self, message: _Submission | _Abort) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _deliver(self, outputs: list[SequenceOutput], statistics: SchedulerStatistics, outlook: Outlook | None) -> None:
        self._statistics = statistics
        self._outlook = outlook
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            self._output_tokens += len(output.token_ids)
            if live.waits and (output.started or output.final):
                live.waits = False
                self._pending_blocks -= live.blocks
                self._acceptance.leave(live.prompt_tokens)
                self._waiting.remove(live.request)
            if output.final:
                del self._live[output.request_id]
                live.gone.set()
                self._seats -= live.seats
            live.sink(output)
        self._update_room()

    def _die(self, failure: EngineDeadError) -> None:
        self._failure = failure
        for live in self._live.values():
            live.gone.set()
        self._live.clear()
        self._room.set()
        self._dead.set()

    def _update_room(self) -> None:
        if self.has_room():
            self._room.set()
        else:
            self._room.clear()
