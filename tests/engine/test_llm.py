"""The offline API as scripts written for vLLM call it, and what it does when it is called wrongly or broken off."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill import LLM, SamplingParams
from pagemill.engine.errors import ConfigError, EngineDeadError, RequestError
from tests.chaos.model import make_model
from tests.engine.tiny_models import CONFIGS, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SIZES: dict[str, Any] = {"threads": 1, "num_blocks_override": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "smollm2-135m",
        tensor_parallel_size=1,
        trust_remote_code=True,
        enforce_eager=True,
        dtype=torch.float32,
        gpu_memory_utilization=np.float32(0.5),
        **SIZES,
    )


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    forms: list[Any] = [
        ["Once upon a time"],
        ("Once upon a time",),
        (text for text in ["Once upon a time"]),
        {"prompt": "Once upon a time", "multi_modal_data": None},
        {"prompt": "Once upon a time", "prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        ids,
        [ids],
        [tuple(ids)],
    ]
    for form in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False, lora_request=None)
        assert output.outputs[0].token_ids == expected, form
        assert output.outputs[0].finished()
    (output,) = llm.generate(prompt_token_ids=[ids], sampling_params=[GREEDY], use_tqdm=True)
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (None, None, "prompt"),
        (5, None, "prompt"),
        (b"text", None, "prompt"),
        ([None], None, "prompt"),
        ([{"prompt": 5}], None, "prompt"),
        ([{"text": "a"}], None, "prompt"),
        ([{"prompt_token_ids": 5}], None, "prompt_token_ids"),
        ([{"prompt_token_ids": "123"}], None, "prompt_token_ids"),
        ([{"prompt_token_ids": [True]}], None, "prompt_token_ids"),
        ([{"prompt_token_ids": [[1]]}], None, "prompt_token_ids"),
        ([{"prompt_token_ids": [10**5000]}], None, "prompt_token_ids"),
        (["a"], {"max_tokens": 3}, "sampling_params"),
        (["a"], [None], "sampling_params"),
        (["a"], SamplingParams, "sampling_params"),
        (["a", "b"], [GREEDY], "sampling_params"),
    ],
)
def test_a_wrong_call_is_refused_by_name(llm: LLM, prompts: Any, params: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert (caught.value.code, caught.value.param) == ("invalid_request", field)


@pytest.mark.parametrize("messages", ["hi", ["hi"], None, {"role": "user", "content": "hi"}, [], [[]], [[{"a": 1}]]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert (caught.value.param or "").partition("[")[0] == "messages"


def test_messages_that_hold_themselves_are_refused(llm: LLM) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="nested"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template_kwargs={"extra": endless})


def test_an_argument_that_asks_for_something_else_is_refused(llm: LLM) -> None:
    for name, value in {"tensor_parallel_size": 2, "quantization": "awq", "tokenizer": "other", "no_such": 1}.items():
        with pytest.raises(ConfigError, match=name):
            LLM("smollm2-135m", **{name: value})
    with pytest.raises(RequestError) as caught:
        llm.generate("a", GREEDY, lora_request=object())
    assert caught.value.param == "lora_request"
    with pytest.raises(TypeError, match="no_such"):
        llm.generate("a", GREEDY, no_such=None)


def test_threads_take_turns(llm: LLM) -> None:
    prompts = ["One", "Two things", "Three more things", "Four"]
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].outputs[0].token_ids, prompts * 2))
    assert found == expected * 2
    llm.check()


def _refusal(llm: LLM, found: Any) -> None:
    try:
        llm.generate("a", GREEDY)
    except EngineDeadError as error:
        found.put(str(error))
    else:
        found.put("")


def _refusal_in_child(llm: LLM) -> str:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=_refusal, args=(llm, found), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return str(found.get())


def test_a_child_forked_in_the_middle_of_a_call_is_told_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, forked = threading.Event(), threading.Event()
    step = llm._step

    def slow() -> Any:
        inside.set()
        assert forked.wait(60)
        return step()

    monkeypatch.setattr(llm, "_step", slow)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, "a", GREEDY)
        assert inside.wait(60)
        refusal = _refusal_in_child(llm)
        forked.set()
        assert "was forked while" in refusal
        assert call.result(60)[0].finished
    assert llm.generate("a", GREEDY)[0].finished


def test_a_child_forked_while_a_call_begins_does_not_wait_for_it(llm: LLM) -> None:
    assert llm.generate("a", GREEDY)[0].finished
    with llm._turns[os.getpid()]:  # whoever begins has it before it can say or do anything
        assert "was forked while" in _refusal_in_child(llm)
    assert _refusal_in_child(llm) == ""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1])
def test_an_interrupt_breaks_off_and_leaves_nothing(llm: LLM, delay: float) -> None:
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    timer = threading.Timer(delay, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        llm.generate(["A long story"] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
    timer.join()
    assert llm.statistics().cache.pool.used == 0
    llm.check()
    assert llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids == expected


def test_the_seed_of_an_llm_makes_its_draws_repeatable() -> None:
    drawn = [
        [
            output.outputs[0].token_ids
            for output in LLM(seed=seed, **SIZES).generate(["One", "One"], SamplingParams(max_tokens=8))
        ]
        for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("params", [{"n": 4, "seed": 7}, {"beam_width": 4, "n": 2}])
def test_choices_share_a_pool_that_is_too_small_for_all(tmp_path: Path, params: dict[str, Any]) -> None:
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path / "tiny")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "threads": 1, "block_size": 4}
    tiny = LLM(folder, num_blocks_override=13, admission="reserve", **settings)
    (output,) = tiny.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=40, **params))
    assert all(choice.finish_reason == "length" for choice in output.outputs)
    assert min(len(choice.token_ids) for choice in output.outputs) >= 8
    tiny.check()


def test_nothing_runs_after_a_step_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("smollm2-135m", **SIZES)

    def broken(output: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm._parts.core._runner, "execute", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate("a", GREEDY)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate("a", GREEDY)


def test_the_log_probabilities_of_a_prompt_that_breaks_the_model_end_its_request_alone(tmp_path: Path) -> None:
    """Embeddings that nobody trained may hold anything, and a row that is no distribution has no likeliest token."""
    weights = load_file(make_model(tmp_path) / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(tmp_path), dtype="float32", threads=1, num_blocks_override=16)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3)
    good, bad = llm.generate([[1, 2, 3], [1, 5, 3]], params)
    assert good.error is None and len(good.outputs[0].token_ids) == 4
    assert bad.error is not None and "not a number" in bad.error.message
    llm.check()
