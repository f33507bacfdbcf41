"""Quantised weights in an engine: what is kept, what it costs in exactness, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.quantization_error import PROMPTS, SCHEMES, compare, continued, logits_behind, runner_of
from safetensors.torch import load_file, save_file

from pagemill import LLM
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.gguf_file import GgufFile
from pagemill.engine.loader import resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.quantization import keeps_gguf, settle
from tests.engine.tiny_decoders import tiny
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import CONFIGS, Driver, save_model

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module", params=["llama-gqa", "llama-mha-tied", "qwen2", "gpt2", "opt-norm-before"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS[request.param](), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("llama"))


def runner(path: Path, kernels: str | None = None, **settings: Any) -> ModelRunner:
    fields: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks_override": 20, "threads": 1}
    config = EngineConfig(model=str(path), **fields | settings)
    found = resolve_model(config.model, config.cache_dir, convert_weights=not keeps_gguf(config))
    return ModelRunner(config, found, kernels=kernels)


def tokens_of(path: Path, kernels: str | None = None, **settings: Any) -> list[int]:
    return Driver(runner(path, kernels, **settings)).generate(PROMPT, 8)


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a weight of a saved model."""
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rounded_models_are_the_same_in_kernels_and_reference(folder: Path, scheme: str) -> None:
    """Every projection goes the same way: stacked, gated, with a bias, transposed, tied."""
    assert tokens_of(folder, quantization=scheme) == tokens_of(folder, "reference", quantization=scheme)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied", "qwen2", "qwen3"])
def test_a_gguf_as_it_is_stored_gives_the_tokens_of_its_values(name: str, tmp_path: Path) -> None:
    """Mixed types, of which some stay quantised, some are widened for their neighbours and some are not kept at all;
    rows in the order of transformers."""
    source = write_gguf(save_model(CONFIGS[name](), tmp_path / "model"), tmp_path / "m.gguf")
    cache = str(tmp_path / "cache")
    converted = tokens_of(source, quantization="none", cache_dir=cache)
    assert tokens_of(source, quantization="gguf", cache_dir=cache) == converted
    assert tokens_of(source, "reference", quantization="gguf", cache_dir=cache) == converted


def test_a_gguf_is_kept_unless_a_dtype_is_asked_for(llama: Path, tmp_path: Path) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf")
    kept = runner(source, "reference", cache_dir=str(tmp_path), dtype="auto")
    assert kept.quantization == "gguf"
    assert {"8-bit", "4-bit"} & set(kept.weight_bytes)
    assert runner(source, "reference", cache_dir=str(tmp_path)).quantization == "none"
    widened = runner(source, "reference", cache_dir=str(tmp_path), dtype="auto", quantization="none")
    assert widened.weight_bytes.keys() == {runner(llama, "reference", dtype="auto").dtype_name}


def test_the_bundled_model_is_kept_as_stored_where_that_is_asked_for() -> None:
    assert not keeps_gguf(EngineConfig(model="smollm2-135m", device="cpu"))
    assert keeps_gguf(EngineConfig(model="smollm2-135m", device="cpu", quantization="gguf"))
    assert keeps_gguf(EngineConfig(model="some.gguf", device="cpu"))


def test_nothing_but_the_file_is_needed_where_it_is_kept(llama: Path, tmp_path: Path) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf")
    found = resolve_model(str(source), tmp_path, convert_weights=False)
    assert found.weight_files == (source,)
    assert not list(found.path.glob("*.safetensors"))
    converted = resolve_model(str(source), tmp_path)
    assert converted.path != found.path
    assert resolve_model(str(source), tmp_path, convert_weights=False).path == converted.path, "it holds all there is"


def test_the_bytes_of_the_weights_are_told(llama: Path) -> None:
    plain, int8, int4 = (runner(llama, quantization=scheme) for scheme in ("none", "int8", "int4"))
    elements = plain.weight_bytes["float32"] / 4
    assert 0.9 * elements * 34 / 32 < int8.weight_bytes["8-bit"] < elements * 34 / 32
    assert int4.weight_bytes["8-bit"] < 0.5 * int8.weight_bytes["8-bit"], "embedding and head only"
    assert int4.weight_bytes["4-bit"] > 0
    assert int8.budget.quantization == "int8"
    assert "- weights (int8)" in str(int8.budget)
    assert int8.budget.to_dict()["quantization"] == "int8"


def test_rows_that_are_no_whole_groups_stay_as_they_are(tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path / "narrow")
    config = json.loads((folder / "config.json").read_text())
    for index in range(config["num_hidden_layers"]):
        edit(folder, f"model.layers.{index}.mlp.down_proj.weight", lambda weight: weight[:, :72].contiguous())
        for name in ("gate_proj", "up_proj"):
            edit(folder, f"model.layers.{index}.mlp.{name}.weight", lambda weight: weight[:72].contiguous())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    plain = runner(folder, quantization="int4")
    assert plain.weight_bytes["float32"] > config["num_hidden_layers"] * 72 * config["hidden_size"] * 4
    assert tokens_of(folder, quantization="int8") == tokens_of(folder, "reference", quantization="int8")


def test_what_cannot_be_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, int8, int4, gguf, got 'awq'"):
        EngineConfig(quantization="awq")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"quantization gguf is for \.gguf files, and .* is not one"):
        runner(llama, quantization="gguf")
    with pytest.raises(ConfigError, match="quantization int4 is built for the CPU only, and the device is cuda"):
        settle(EngineConfig(quantization="int4"), resolve_model(str(llama)), "cuda")
    generic = save_model(tiny("gpt_neox"), tmp_path)
    with pytest.raises(ConfigError, match=r"quantization int8 is for models that are computed natively .*GPTNeoX"):
        runner(generic, quantization="int8")


def test_a_weight_that_is_no_number_cannot_be_rounded(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    edit(folder, "model.layers.1.mlp.down_proj.weight", lambda weight: weight / 0)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight holds what is no finite number, which int8"
    ):
        runner(folder, quantization="int8")


def test_a_gguf_with_a_scale_that_is_no_number_is_named(llama: Path, tmp_path: Path) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf")
    tensor = next(each for each in GgufFile(source).tensors.values() if each.kind == "Q8_0")
    raw = bytearray(source.read_bytes())
    raw[tensor.offset : tensor.offset + 2] = b"\x00\x7c"
    source.write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"tensor {tensor.name} of Q8_0 is damaged: a scale is not finite"):
        runner(source, quantization="gguf", cache_dir=str(tmp_path))


def test_none_of_vllm_is_what_the_model_says(llama: Path) -> None:
    llm = LLM(model=str(llama), quantization=None, skip_tokenizer_init=True, num_blocks_override=20, threads=1)
    assert llm.info.quantization == "none"
    with pytest.raises(ConfigError, match="quantization must be one of"):
        LLM(model=str(llama), quantization="gptq", skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def exact() -> tuple[list[list[int]], list[torch.Tensor]]:
    """Three texts of SmolLM2's and its logits in float32."""
    texts = continued("smollm2-135m", PROMPTS[:3], 24)
    plain = runner_of("smollm2-135m", dtype="float32", quantization="none")
    return texts, [logits_behind(plain, ids) for ids in texts]


@pytest.mark.parametrize(
    ("scheme", "largest", "mean", "agreement"),
    [("gguf, float32", 1e-3, 1e-4, 1.0), ("gguf", 0.6, 0.05, 0.97), ("int8", 1.0, 0.1, 0.97), ("int4", 6.0, 0.8, 0.85)],
)
def test_the_error_of_smollm2(
    exact: tuple[list[list[int]], list[torch.Tensor]], scheme: str, largest: float, mean: float, agreement: float
) -> None:
    texts, expected = exact
    runner = runner_of("smollm2-135m", **SCHEMES[scheme])
    error = compare(expected, [logits_behind(runner, ids) for ids in texts])
    assert error.largest < largest
    assert error.mean < mean
    assert error.agreement >= agreement
