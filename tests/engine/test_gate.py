"""What is not served, and why: by its configuration, by the calls that it makes, by its logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import resolve_model
from pagemill.engine.models import NATIVE_ARCHITECTURES, generic
from pagemill.engine.models.attention_interface import AttentionCall, PagedAttention
from pagemill.engine.models.gathered_attention import gathered_attention
from pagemill.engine.models.llama import LlamaModel
from pagemill.engine.tokenizer import Tokenizer
from pagemill.kernels.layout import KVForm
from tests.engine.test_models import make_runner
from tests.engine.tiny_decoders import GENERIC, tiny
from tests.engine.tiny_models import CONFIGS, Driver, generated_by_transformers, save_model
from tests.kernels.paged import distance, make_case, naive_attention

Refused = tuple[str, str, dict[str, Any], str]

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
# Architecture, model type, further fields of config.json, and a part of the reason.
BY_CONFIGURATION: list[Refused] = [
    ("T5ForConditionalGeneration", "t5", {}, "encoder-decoder"),
    ("BartForConditionalGeneration", "bart", {}, "encoder-decoder"),
    ("WhisperForConditionalGeneration", "whisper", {}, "encoder-decoder"),
    ("MambaForCausalLM", "mamba", {}, "keep a state"),
    ("Mamba2ForCausalLM", "mamba2", {}, "keep a state"),
    ("FalconMambaForCausalLM", "falcon_mamba", {}, "keep a state"),
    ("RwkvForCausalLM", "rwkv", {}, "keep a state"),
    ("JambaForCausalLM", "jamba", {}, "keep a state"),
    ("BambaForCausalLM", "bamba", {}, "keep a state"),
    ("FalconH1ForCausalLM", "falcon_h1", {}, "keep a state"),
    ("RecurrentGemmaForCausalLM", "recurrent_gemma", {}, "layers of the kind recurrent"),
    ("Qwen3NextForCausalLM", "qwen3_next", {}, "layers of the kind linear_attention"),
    ("NemotronHForCausalLM", "nemotron_h", {}, "layers of the kind linear_attention"),
    ("Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv"] * 32}, "layers of the kind conv"),
    ("BloomForCausalLM", "bloom", {}, "alibi"),
    ("MptForCausalLM", "mpt", {}, "alibi"),
    ("FalconForCausalLM", "falcon", {"alibi": True}, "alibi"),
    ("Llama4ForCausalLM", "llama4_text", {}, "chunked_attention"),
    ("GemmaForCausalLM", "gemma", {"rope_parameters": DYNAMIC}, "'dynamic'"),
    ("Gemma3ForConditionalGeneration", "gemma3", {}, "several parts"),
    ("LlavaForConditionalGeneration", "llava", {}, "several parts"),
    ("BertForMaskedLM", "bert", {}, "not those of the causal language model of its type, BertLMHeadModel"),
    ("GPT2LMHeadModel", "gpt_bigcode", {}, "GPTBigCodeForCausalLM"),
    ("ViTForImageClassification", "vit", {}, "no causal language model"),
    ("NewForCausalLM", "new-in-town", {}, "does not know the model type 'new-in-town'"),
    ("NewForCausalLM", "new-in-town", {"auto_map": {"AutoModel": "x.New"}}, "code of its own, which is never run"),
]


@pytest.mark.parametrize(("architecture", "model_type", "fields", "reason"), BY_CONFIGURATION)
def test_refused_by_its_configuration_before_any_weight_is_read(
    architecture: str, model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {"architectures": [architecture], "model_type": model_type} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_text("whoever reads this fails in another way")
    with pytest.raises(ConfigError, match=f"architecture {architecture} of .* is not supported: .*{reason}"):
        make_runner(tmp_path, "cpu")


# A configuration that says nothing, and a part of the reason that the model itself gives.
BY_TRIAL: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "falcon": (lambda: tiny("falcon", alibi=False), "does not run with a paged attention"),
    "xglm": (lambda: tiny("xglm", d_model=64, num_layers=2, attention_heads=4, ffn_dim=96), "0 attention calls of 2"),
    "openai-gpt": (lambda: tiny("openai-gpt"), "0 attention calls of 2"),
    "diffllama": (lambda: tiny("diffllama"), "4 attention calls of 2 layers"),
    "gemma4_unified_text": (lambda: tiny("gemma4_unified_text", num_hidden_layers=6), "differ in the number or the w"),
    "bert": (lambda: tiny("bert"), "attends in both directions"),
    "bart": (
        lambda: tiny("bart", d_model=64, decoder_layers=2, decoder_ffn_dim=96, decoder_attention_heads=4),
        "logits are off by",
    ),
    "roberta": (lambda: tiny("roberta", is_decoder=True, pad_token_id=1), "logits are off by"),
}


@pytest.mark.parametrize("name", BY_TRIAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refused_by_what_it_does(name: str, dtype: str, tmp_path: Path) -> None:
    config, reason = BY_TRIAL[name]
    with pytest.raises(ConfigError, match=f"is not supported: .*{reason}"):
        make_runner(save_model(config(), tmp_path), "cpu", dtype=dtype)


def _break_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedAttention.attend

    def without(self: PagedAttention, call: AttentionCall) -> torch.Tensor:
        object.__setattr__(call, "window", 0)
        return attend(self, call)

    monkeypatch.setattr(PagedAttention, "attend", without)


def _break_window_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedAttention.attend

    def one_more(self: PagedAttention, call: AttentionCall) -> torch.Tensor:
        object.__setattr__(call, "window", call.window and call.window + 1)
        return attend(self, call)

    monkeypatch.setattr(PagedAttention, "attend", one_more)


def _break_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts the places of a batch instead of looking at positions."""
    forward = generic.GenericModel.forward

    def counting(self: Any, token_ids: torch.Tensor, meta: Any, kv: Any, rows: torch.Tensor) -> torch.Tensor:
        object.__setattr__(meta, "positions", torch.arange(len(token_ids)))
        return forward(self, token_ids, meta, kv, rows)

    monkeypatch.setattr(generic.GenericModel, "forward", counting)


def _break_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose own attention adds a slight bias by distance to the scores, which the interface does not show."""
    from transformers.models.gemma3 import modeling_gemma3

    eager = modeling_gemma3.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        return eager(module, query, key, value, mask + 0.25 * distance.to(mask.dtype), **kwargs)

    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", biased)


@pytest.mark.parametrize("break_it", [_break_windows, _break_window_by_one, _break_positions, _break_mask])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_sees_what_would_be_silently_wrong(
    break_it: Callable[[pytest.MonkeyPatch], None], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(GENERIC["gemma3_text"](), tmp_path)
    make_runner(path, "cpu", dtype=dtype)
    break_it(monkeypatch)
    with pytest.raises(ConfigError, match="logits are off by"):
        make_runner(path, "cpu", dtype=dtype)


def test_windows_are_as_long_as_before_the_trial(tmp_path: Path) -> None:
    path = save_model(tiny("gemma3_text", head_dim=16, sliding_window=20, num_hidden_layers=2), tmp_path)
    runner = make_runner(path, "cpu")
    prompt = list(range(100, 160))
    assert Driver(runner).generate(prompt, 8) == generated_by_transformers(path, [prompt], 8)[0]


def test_a_real_model_passes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding moves its logits ten times as far as those of a tiny model with random weights."""
    monkeypatch.setattr("pagemill.engine.models._NATIVE", {})
    runner = make_runner("smollm2-135m", "cpu", dtype="bfloat16")  # type: ignore[arg-type]
    assert isinstance(runner._model, generic.GenericModel)
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = Tokenizer.from_folder(resolve_model("smollm2-135m").path).encode(question)
    assert Driver(runner).generate(prompt, 8) == [504, 3575, 282, 4649, 314, 7042, 30, 2]


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 weights, first model.layers.1.mlp.up_proj"),
        (lambda w: w.update(surplus=torch.ones(2)), "1 weights that the model lacks, first surplus"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "transformers cannot load"),
        (
            lambda w: w.update({name: w[name].to(torch.float8_e4m3fn) for name in w if "up_proj" in name}),
            r"up_proj\.weight is stored in 8 bits or less: quantised",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_not_filled_up(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    path = save_model(GENERIC["gemma"](), tmp_path)
    _edit(path, change)
    with pytest.raises(ConfigError, match=message):
        make_runner(path, "cpu")


def test_a_folder_in_other_forms(tmp_path: Path) -> None:
    """PyTorch's own files, safetensors without metadata, and code beside a model that transformers has itself."""
    saved = save_model(GENERIC["gemma"](), tmp_path / "saved")
    prompt = [5, 9, 200, 31, 7]
    [expected] = generated_by_transformers(saved, [prompt], 8)
    weights = load_file(saved / "model.safetensors")
    for form in ("pickled", "bare", "with code"):
        folder = tmp_path / form
        folder.mkdir()
        config = json.loads((saved / "config.json").read_text())
        if form == "with code":
            config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
            (folder / "evil.py").write_text("raise SystemExit('code of a model must not run')")
        (folder / "config.json").write_text(json.dumps(config))
        if form == "pickled":
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file(weights, folder / "model.safetensors")
        assert Driver(make_runner(folder, "cpu")).generate(prompt, 8) == expected, form


def test_an_architecture_under_a_name_of_its_maker_is_native(tmp_path: Path) -> None:
    """Many models are Llamas under another model type; where transformers knows that type, it knows better."""
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "Yi"}))
    assert isinstance(make_runner(folder, "cpu")._model, LlamaModel)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "internlm3", "qkv_bias": False}))
    assert isinstance(make_runner(folder, "cpu")._model, generic.GenericModel)


def test_max_model_len_is_the_models_or_less(tmp_path: Path) -> None:
    path = save_model(GENERIC["gpt_neox"](), tmp_path)
    with pytest.raises(ConfigError, match="max_model_len 129 is more than the model's 128 tokens"):
        make_runner(path, "cpu", max_model_len=129)
    for longest in (40, 20, 1):
        assert make_runner(path, "cpu", max_model_len=longest).spec.max_model_len == longest
    short = save_model(tiny("gpt_bigcode", max_position_embeddings=8), tmp_path / "short")
    assert make_runner(short, "cpu").spec.max_model_len == 8


def test_longrope_is_served_as_far_as_its_frequencies_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    path = save_model(GENERIC["phi3-longrope"](), tmp_path)
    assert make_runner(path, "cpu").spec.max_model_len == 80
    with pytest.raises(ConfigError, match="max_model_len 81 is more than the model's 80 tokens"):
        make_runner(path, "cpu", max_model_len=81)


@pytest.mark.parametrize("form", ["k_major", "token_major"])
@pytest.mark.parametrize("window", [0, 8])
def test_gathered_attention(window: int, form: KVForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As slot by slot, in slices of queries; and blocks behind the window may be another's by now, or hold NaN."""
    monkeypatch.setattr("pagemill.engine.models.gathered_attention._SCORES_AT_ONCE", 900)
    case = make_case([70, 20, 33], [1, 20, 7], form=form)
    expected = naive_attention(case, 0.3, window)
    if window:
        behind = torch.from_numpy(case.meta.host.block_tables[0, :3]).long()
        case.kv.k[behind] = float("nan")
        case.kv.v[behind] = float("nan")
    actual = gathered_attention(case.query, case.kv, case.meta, scale=0.3, window=window, softcap=0.0, sinks=None)
    assert distance(actual, expected) < 1e-6
    capped = gathered_attention(case.query, case.kv, case.meta, scale=0.3, window=window, softcap=1e4, sinks=None)
    assert distance(capped, expected) < 1e-4
    faint = torch.full((4,), -100.0)
    sunk = gathered_attention(case.query, case.kv, case.meta, scale=0.3, window=window, softcap=0.0, sinks=faint)
    assert distance(sunk, expected) < 1e-6


def test_transformers_is_as_it_was(tmp_path: Path) -> None:
    """Loading leaves nothing behind in transformers that another user of it in this process could trip over."""
    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        path = save_model(GENERIC["gemma"](), tmp_path)
        make_runner(path, "cpu")
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.config._attn_implementation == "sdpa"
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    finally:
        logging.set_verbosity_warning()


def _table(heading: str) -> set[str]:
    """The first column of the table under a heading of docs/models.md."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return set(rows[2:])


def test_the_page_on_models_says_what_is_tried_here() -> None:
    classes = {name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config().model_type] for name, config in GENERIC.items()}
    assert _table("Native") == set(NATIVE_ARCHITECTURES)
    assert _table("Through transformers") == set(classes.values())
    by_trial = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config().model_type] for config, _ in BY_TRIAL.values()}
    by_configuration = {architecture for architecture, model_type, fields, _ in BY_CONFIGURATION}
    elsewhere = {
        "BertForMaskedLM",
        "GPT2LMHeadModel",
        "GemmaForCausalLM",
        "ViTForImageClassification",
        "NewForCausalLM",
    }
    assert _table("The gate") == by_trial | by_configuration - elsewhere
