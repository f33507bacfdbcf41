"""Offline inference with vLLM's face: prompts in, finished outputs back, no Redis."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, cast

from pagemill.engine.assembly import EngineInfo, build
from pagemill.engine.chat import Chat
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError, EngineDeadError, invalid
from pagemill.engine.interrupts import held_back
from pagemill.engine.loader import Progress, no_progress
from pagemill.engine.logprobs import to_vllm
from pagemill.engine.outputs import CompletionOutput, RequestOutput, SequenceOutput
from pagemill.engine.prompt import Prompt, TokenIds, make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_statistics import SchedulerStatistics
from pagemill.engine.values import as_integer, shown
from pagemill.engine.vllm_arguments import CALL_ARGUMENTS, LLM_ARGUMENTS, is_accepted

Messages = Sequence[Mapping[str, Any]]
PromptInput = str | Mapping[str, Any] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None

_DTYPE_NAMES = {"half": "float16", "float": "float32", "torch.half": "float16", "torch.float": "float32"}
_SPECULATION = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "cache_salt"))
_PROMPT_FORMS = 'a prompt must be text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    prompt: Prompt
    text: str | None = None  # as the output repeats it
    cache_salt: str = ""


class LLM:
    """A model with its paged KV pool, for batches of prompts in this process.

    Keyword arguments are the fields of `EngineConfig`. Raises `ConfigError` on one that is unknown or out of range.
    vLLM's other arguments are accepted at the values that ask for nothing else than what is done here. `seed` makes the
    draws of requests without a seed of their own repeatable. Calls from several threads run one after the other.

        llm = LLM(model="smollm2-135m", block_size=16, gpu_memory_utilization=0.85)
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=16)):
            print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2-135m",
        *,
        seed: int | None = None,
        progress: Progress = no_progress,
        **settings: Any,
    ):
        if seed is not None and as_integer(seed) is None:
            raise ConfigError(f"seed must be an integer, got {shown(seed)}")
        self._seeds = secrets.SystemRandom() if seed is None else random.Random(as_integer(seed))
        # Nobody tells the reasoning of these texts from their answers, so structure begins with the text, as in vLLM.
        given = {"reasoning_parser": "none", **_settings(model, settings)}
        self._parts = build(EngineConfig(**given), progress)
        self._count = 0
        self._turns: dict[int, threading.Lock] = {}  # by process
        self._failure: EngineDeadError | None = None

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        **arguments: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}; the last two may have a
        `cache_salt`. One `SamplingParams` serves all prompts, a list gives each its own. `use_tqdm` shows a progress
        bar. `prompt_token_ids` and the rest are older and other arguments of vLLM. Raises `RequestError`, before
        anything runs, if any prompt or parameter is refused.
        """
        _check_arguments(arguments)
        if prompt_token_ids is not None:
            if prompts is not None:
                raise invalid("prompts and prompt_token_ids cannot be combined", "prompt_token_ids")
            prompts = prompt_token_ids
        return self._run([_input(item) for item in _items(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of conversations.

        The other arguments are the fields of `Chat` and of vLLM; they hold for each conversation.
        """
        _check_arguments(arguments)
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise invalid("messages must be a conversation (a list of messages) or a list of them", "messages")
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        chats = [
            Chat(
                conversation,
                tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self._run([_Input(chat) for chat in chats], sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers makes it. Raises `ConfigError` under `skip_tokenizer_init`."""
        if self._parts.tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self._parts.tokenizer.transformers_tokenizer

    def statistics(self) -> SchedulerStatistics:
        """The pool, the prefix cache and the scheduler: state now and record since the start."""
        return self._parts.core.scheduler.statistics()

    def check(self) -> None:
        """Assert every invariant of the block pool and the scheduler. Raises `AssertionError` with what is broken."""
        self._parts.core.check()

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes. Returns how many blocks were known."""
        return self._parts.core.scheduler.cache.forget_cached()

    def _run(self, inputs: list[_Input], sampling_params: Params, use_tqdm: bool) -> list[RequestOutput]:
        params = _params(sampling_params, len(inputs))
        with self._taking_turns():
            requests = [self._request(item, own) for item, own in zip(inputs, params, strict=True)]
            outputs = {
                request.request_id: _empty(request, item) for request, item in zip(requests, inputs, strict=True)
            }
            try:
                with _progress_bar(len(requests), use_tqdm) as finished:
                    self._steps(requests, outputs, finished)
            finally:
                # After Ctrl-C nothing of this call may stay behind.
                with held_back():
                    for request in requests:
                        self._parts.core.abort(request.request_id)
        return [outputs[request.request_id] for request in requests]

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Raises `EngineDeadError` where nothing may run, be it in a child that was forked in the middle of a call of
        another thread: that call never ends there."""
        process = os.getpid()
        turn = self._turns.setdefault(process, threading.Lock())
        # A lock of the process that this one was forked from is for ever as it was at that moment.
        if any(other.locked() for owner, other in list(self._turns.items()) if owner != process):
            raise EngineDeadError(
                "the process was forked while a thread was in a call of this LLM, so it is torn here; make a new one"
            )
        with turn:
            if self._failure is not None:
                raise self._failure
            yield

    def _steps(
        self, requests: list[Request], outputs: dict[str, RequestOutput], finished: Callable[[int], object]
    ) -> None:
        core = self._parts.core
        with held_back():
            increments = [increment for request in requests for increment in core.add(request)]
        while True:
            for increment in increments:
                _fold(outputs[increment.request_id], increment)
            finished(sum(increment.final for increment in increments))
            if not core.has_requests:
                return
            with held_back():
                increments = self._step()

    def _step(self) -> list[SequenceOutput]:
        try:
            return self._parts.core.step()
        except BaseException as error:
            # What a step had taken when it broke off is unknown: nothing may run on this pool any more.
            self._failure = EngineDeadError(
                f"a step of this LLM failed: {type(error).__name__}: {error}; make a new LLM"
            )
            raise

    def _request(self, item: _Input, params: SamplingParams) -> Request:
        parts = self._parts
        self._count += 1
        return make_request(
            f"offline-{self._count}",
            item.prompt,
            params,
            parts.limits,
            parts.tokenizer,
            cache_salt=item.cache_salt,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(64),
            compiler=parts.compiler,
        )


def _settings(model: object, settings: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings out of an `LLM`'s arguments. Raises `ConfigError`."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    taken: dict[str, Any] = {"model": model}
    for name, value in settings.items():
        if name == "num_gpu_blocks_override":
            taken["num_blocks_override"] = value
        elif name == "speculative_config":
            taken |= _speculation(value)
        elif name == "tokenizer":
            if value is not None and value != model:
                raise ConfigError("tokenizer must be left out: the model's own is used")
        elif name == "dtype":
            text = str(value)
            taken[name] = _DTYPE_NAMES.get(text, text.removeprefix("torch."))
        elif name == "device":
            taken[name] = str(value)
        elif name == "quantization" and value is None:
            continue  # vLLM's word for what the model says
        elif name in known:
            taken[name] = value
        elif name not in LLM_ARGUMENTS:
            raise ConfigError(f"unknown setting {name!r}; known are: {', '.join(sorted(known))}")
        elif not is_accepted(LLM_ARGUMENTS, name, value):
            raise ConfigError(f"{name}={shown(value)} is not supported; leave it out")
    return taken


def _speculation(given: object) -> dict[str, Any]:
    """The settings that vLLM's `speculative_config` stands for. None: what is set otherwise."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a mapping, got {shown(given)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        if name in ("method", "model"):
            if value not in ("ngram", "[ngram]"):
                raise ConfigError(f"speculative_config: {name} must be ngram, got {shown(value)}")
        elif name not in _SPECULATION:
            raise ConfigError(
                f"speculative_config: {shown(name)} is not supported; known are: {', '.join(('method', *_SPECULATION))}"
            )
    taken = {name: chosen[name] for name in _SPECULATION if name in chosen}
    longest, shortest = taken.get("prompt_lookup_max"), taken.get("prompt_lookup_min")
    if longest is None and shortest is not None:
        taken["prompt_lookup_max"] = shortest  # as in vLLM: one length given, that length only
    elif shortest is None and longest is not None:
        taken["prompt_lookup_min"] = longest
    return taken


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in CALL_ARGUMENTS:
            raise TypeError(f"unexpected argument {name!r}")
        if not is_accepted(CALL_ARGUMENTS, name, value):
            raise invalid(f"{name} is not supported; leave it out", name)


def _items(prompts: object) -> list[Any]:
    """One prompt or several as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise invalid(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}", "prompt")
    items = list(prompts)
    return [items] if items and as_integer(items[0]) is not None else items


def _input(item: object) -> _Input:
    if isinstance(item, str):
        return _Input(item, item)
    if isinstance(item, Collection) and not isinstance(item, bytes | Mapping):
        return _Input(TokenIds(cast("Sequence[int]", item)))
    if isinstance(item, Mapping):
        given = {name: value for name, value in item.items() if value is not None}
        text, salt = given.get("prompt"), given.get("cache_salt", "")
        if given.keys() <= _PROMPT_KEYS and isinstance(salt, str):
            if "prompt_token_ids" in given and isinstance(text, str | None):
                return _Input(TokenIds(given["prompt_token_ids"]), text, salt)
            if isinstance(text, str):
                return _Input(text, text, salt)
    raise invalid(_PROMPT_FORMS, "prompt")


def _params(given: object, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, Sequence) or not all(isinstance(item, SamplingParams) for item in given):
        raise invalid("sampling_params must be a SamplingParams or a list of them", "sampling_params")
    if len(given) != count:
        raise invalid(f"{count} prompts need as many sampling_params, got {len(given)}", "sampling_params")
    return list(given)


@contextmanager
def _progress_bar(total: int, shown_at_all: bool) -> Iterator[Callable[[int], object]]:
    if not shown_at_all:
        yield lambda count: None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        yield bar.update


def _empty(request: Request, item: _Input) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=item.text,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index, text="", token_ids=[]) for index in range(request.params.n)],
        finished=False,
    )


def _fold(output: RequestOutput, increment: SequenceOutput) -> None:
    choice = output.outputs[increment.index]
    choice.text += increment.text
    choice.token_ids += increment.token_ids
    if increment.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *map(to_vllm, increment.logprobs)]
        summed = sum(position.chosen.logprob for position in increment.logprobs)
        choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + summed
    if increment.prompt_logprobs is not None:
        output.prompt_logprobs = [None if each is None else to_vllm(each) for each in increment.prompt_logprobs]
    if increment.finish_reason is not None:
        choice.finish_reason = increment.finish_reason
        choice.stop_reason = increment.stop_reason
        if increment.cumulative_logprob is not None:
            choice.cumulative_logprob = increment.cumulative_logprob
    if increment.final:
        output.finished = True
        output.error = increment.error
        output.metrics = increment.metrics
        if increment.metrics is not None:
            output.num_cached_tokens = increment.metrics.cached_tokens
