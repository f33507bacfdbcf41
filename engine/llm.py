"""Offline inference with vLLM's face: prompts in, finished outputs back, no Redis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagemill.engine.assembly import EngineInfo, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.engine.loader import Progress, no_progress
from pagemill.engine.outputs import CompletionOutput, RequestOutput, SequenceOutput
from pagemill.engine.prompt import Messages, Prompt, TokenIds, make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler import SchedulerStatistics

PromptInput = str | Mapping[str, Any]


class LLM:
    """A model with its paged KV pool, for batches of prompts in this process.

    Keyword arguments are the fields of `EngineConfig`. Raises `ConfigError` on one that is unknown or out of range.

        llm = LLM(model="smollm2-135m", block_size=16, gpu_memory_utilization=0.85)
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=16)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str = "smollm2-135m", *, progress: Progress = no_progress, **settings: Any):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known are: {', '.join(sorted(known))}")
        self._parts = build(EngineConfig(model=model, **settings), progress)
        self._count = 0

    @property
    def info(self) -> EngineInfo:
        return self._parts.info

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        A prompt is text, {"prompt": text} or {"prompt_token_ids": [...]}. One `SamplingParams` serves all prompts, a
        list gives each its own. Raises `RequestError`, before anything runs, if any prompt or parameter is refused.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run([_prompt(item) for item in items], sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of conversations."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        return self._run(cast("list[Prompt]", list(conversations)), sampling_params)

    def statistics(self) -> SchedulerStatistics:
        """The pool, the prefix cache and the scheduler: state now and record since the start."""
        return self._parts.core.scheduler.statistics()

    def check(self) -> None:
        """Assert every invariant of the block pool and the scheduler. Raises `AssertionError` with what is broken."""
        self._parts.core.check()

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes. Returns how many blocks were known."""
        return self._parts.core.scheduler.cache.forget_cached()

    def _run(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts need as many sampling_params, got {len(params)}")
        requests = [self._request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        outputs = {
            request.request_id: _empty(request, prompt) for request, prompt in zip(requests, prompts, strict=True)
        }
        core = self._parts.core
        try:
            for request in requests:
                for increment in core.add(request):
                    _fold(outputs[increment.request_id], increment)
            while core.has_requests:
                for increment in core.step():
                    _fold(outputs[increment.request_id], increment)
        finally:
            # After Ctrl-C or a failed step nothing of this call may stay behind.
            for request in requests:
                core.abort(request.request_id)
        return [outputs[request.request_id] for request in requests]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        parts = self._parts
        self._count += 1
        return make_request(f"offline-{self._count}", prompt, params, parts.limits, parts.tokenizer)


def _prompt(item: PromptInput) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping) and len(item) == 1:
        if "prompt_token_ids" in item:
            return TokenIds(item["prompt_token_ids"])
        if isinstance(item.get("prompt"), str):
            return str(item["prompt"])
    raise RequestError(
        "invalid_request", 'a prompt must be text, {"prompt": text} or {"prompt_token_ids": [...]}', param="prompt"
    )


def _empty(request: Request, prompt: Prompt) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index, text="", token_ids=[]) for index in range(request.params.n)],
        finished=False,
    )


def _fold(output: RequestOutput, increment: SequenceOutput) -> None:
    choice = output.outputs[increment.index]
    choice.text += increment.text
    choice.token_ids += increment.token_ids
    if increment.finish_reason is not None:
        choice.finish_reason = increment.finish_reason
        choice.stop_reason = increment.stop_reason
        choice.cumulative_logprob = increment.cumulative_logprob
    if increment.final:
        output.finished = True
        output.error = increment.error
        output.metrics = increment.metrics
        if increment.metrics is not None:
            output.num_cached_tokens = increment.metrics.cached_tokens
