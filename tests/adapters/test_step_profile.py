"""`pagemill bench step`: the parts sum up to the run, and the engine is as before when the clocks are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill.adapters.cli.main import run
from pagemill.engine.blank_model import write_blank_llama
from pagemill.engine.llm import LLM
from pagemill.engine.profiler import WHOLE, Profiler
from pagemill.engine.sampling_params import SamplingParams

SMALL: dict[str, Any] = {
    "threads": 1,
    "skip_tokenizer_init": True,
    "num_blocks_override": 64,
    "max_num_seqs": 8,
    "num_speculative_tokens": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_blank_llama(folder)
    return folder


def test_the_table_accounts_for_the_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "work.jsonl"
    row = json.dumps({"prompt_token_ids": [5, 6, 7, 8, 9], "max_tokens": 12})
    workload.write_text(f"{row}\n{row}\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"model": model}).items()]
    common = ["bench", "step", "--workload", str(workload), "--dtype=float32", *flags]
    assert run([*common, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [table["by_operation"] for table in tables] == [False, True][: len(tables)]
    for table in tables:
        parts = {part["part"]: part for part in table["parts"]}
        assert table["output_tokens"] == 24
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0)
        counted = sum(part["ms_per_step"] for part in parts.values()) * table["steps"] / 1e3
        assert 0 < counted < table["wall_s"]
        assert parts["scheduling"]["calls_per_step"] == 2
        computed = parts["sampling" if table["by_operation"] else WHOLE]
        assert computed["calls_per_step"] == 1
        assert all(0 <= part["python_ms"] <= part["ms_per_step"] for part in parts.values())
        assert parts["scheduling"]["python_ms"] == parts["scheduling"]["ms_per_step"]
        assert computed["python_ms"] < computed["ms_per_step"]
        assert 0 < table["python"] < 1
        assert all(limit > 0 for limit in table["limits"].values())
    inside = {part["part"]: part for part in tables[-1]["parts"]}
    assert inside["attention"]["calls_per_step"] == 1  # a layer
    assert inside["linear 256 -> 192"]["gflop_s"] > 0
    assert run(common) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "Python, outside of kernels" in shown


def test_the_clocks_leave_nothing_behind(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", **SMALL)
    runner: Any = llm._parts.core._runner
    owners = [llm._parts.core, llm._parts.core.scheduler, runner, runner.ops, runner._model]
    before = [dict(vars(owner)) for owner in owners]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    profiler = Profiler(llm._parts.core)
    for by_operation in (False, True):
        with pytest.raises(KeyError), profiler.attached(by_operation=by_operation):
            assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
            raise KeyError
        assert profiler.steps == 8
        assert [vars(owner).keys() for owner in owners] == [old.keys() for old in before]
    assert runner._model.__dict__.get("compiled") is before[-1].get("compiled")


def test_a_gpu_has_a_profiler_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = tmp_path / "work.jsonl"
    workload.write_text('{"prompt_token_ids": [5], "max_tokens": 1}\n')
    assert run(["bench", "step", "--workload", str(workload), "--device", "cuda"]) == 2
    assert "device must be cpu" in capsys.readouterr().err
