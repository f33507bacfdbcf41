"""A GGUF file to a folder of config.json and tokenizer files, and of safetensors where these are wanted, once.

Weights are dequantised to float32 exactly as `gguf` defines them (what transformers computes, bit for bit), so that
every dtype can be derived from them. The folder is made under another name and renamed when complete: whoever finds it
finds all of it, also with several converters at work, and a crash leaves a temporary folder for the next to remove.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from pagemill.engine.errors import ConfigError
from pagemill.engine.gguf_file import GgufFile, GgufTensor
from pagemill.engine.loader import Progress, no_progress

_log = structlog.get_logger(__name__)

_FORMAT = 1  # part of the cache key: raise it when the converted files change
_SHARD_BYTES = 2 << 30
_STALE_SECONDS = 3600

# GGUF architecture: the class and the model type of transformers. Mistral is a llama with a sliding window.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    # Per-frequency divisors, in which GGUF keeps Llama 3's rope scaling; the Llama model knows the name.
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = "converted.json"  # name -> bytes of every other file of a converted folder
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def converted_folder(source: Path, models: Path, progress: Progress = no_progress, *, weights: bool = True) -> Path:
    """The folder below `models` that holds `source` converted; made if it is not there yet. weights: whether weights
    are wanted there too, beside the configuration and the tokenizer.

    The file is known by path, size and time of change, so that finding it converted reads nothing of it. Raises
    `ConfigError` on a file that is missing, damaged or of an architecture that is not supported, and where the folder
    cannot be written.
    """
    try:
        stat = source.stat()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    key = f"{_FORMAT}\0{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    stem = re.sub(r"[^\w.-]+", "-", source.stem)[:80]
    target = models / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if _is_whole(target):
        return target
    if not weights:
        target = target.with_name(f"{target.name}-without-weights")
        if _is_whole(target):
            return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        _remove_stale(models)
        if target.is_dir():
            _log.warning("the converted model is damaged and is made again", folder=str(target))
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                shutil.rmtree(
                    target.rename(Path(tempfile.mkdtemp(prefix=".converting-", dir=models)) / "damaged").parent
                )
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=models))
    except OSError as error:
        raise ConfigError(
            f"converted models are kept in {models}, which cannot be written ({error}); set cache_dir"
        ) from error
    from safetensors import SafetensorError

    try:
        convert(source, work, progress, weights=weights)
        sizes = {file.name: file.stat().st_size for file in work.iterdir()}
        (work / _SIZES).write_text(json.dumps(sizes))
        work.chmod(0o755)
        for file in work.iterdir():  # made private by mkdtemp and safetensors; a cache may serve several users
            file.chmod(0o644)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster with the same file
                raise
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source.name} could not be converted in {models}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    """Whether all files of a converted folder have the sizes they were written with: a full disk, a power cut or a
    cleaner of caches may have taken from it."""
    try:
        sizes = json.loads((folder / _SIZES).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def convert(source: Path, folder: Path, progress: Progress = no_progress, *, weights: bool = True) -> None:
    """Write the model in the GGUF file `source` into the existing, empty `folder`, with its weights or without."""
    file = GgufFile(source)
    config, generation = configuration(file)
    for name in file.tensors:
        stored_name(name, source)
    _write_tokenizer(file, source, folder)
    if weights:
        _write_weights(file, config, folder, progress)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _field(file: GgufFile, name: str, default: Any = None) -> Any:
    value = file.fields.get(name)
    if value is None:
        return default
    return value.tolist() if isinstance(value, np.ndarray) else value


def configuration(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json from the file's metadata."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{file.path.name}: {what}")

    architecture = _field(file, "general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise refuse(f"GGUF architecture {architecture!r} is not supported; supported are {supported}")
    if _field(file, "split.count", 0) > 1:
        raise refuse("this is one part of a split GGUF; join them with `llama-gguf-split --merge`")
    if _field(file, f"{architecture}.expert_count", 0):
        raise refuse("mixture-of-experts models are not supported")

    def number(name: str, default: Any = None) -> Any:
        value = _field(file, f"{architecture}.{name}", default)
        if isinstance(value, list):  # written per layer by some converters
            value = value[0] if len(set(value)) == 1 else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(f"{architecture}.{name} is missing or not one number")
        return value

    shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    if "token_embd.weight" not in shapes:
        raise refuse("the file has no token_embd.weight")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", number("rope.dimension_count", hidden // max(1, heads)))
    if number("rope.dimension_count", head_dim) != head_dim:
        raise refuse("rotary embedding of a part of the head is not supported")
    if number("attention.value_length", head_dim) != head_dim:
        raise refuse("keys and values of different length are not supported")
    window = _field(file, "llama.attention.sliding_window")
    kind, model_type = ("MistralForCausalLM", "mistral") if window else _ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "architectures": [kind],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, architecture, number, refuse),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "float32",
    }
    if window:
        config["sliding_window"] = int(window)
    ids = [_field(file, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = [int(item) for item in dict.fromkeys(ids) if item is not None]
    config["bos_token_id"] = _field(file, "tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = eos[0] if eos else None
    return config, {"bos_token_id": config["bos_token_id"], "eos_token_id": eos or None}


def _rope(file: GgufFile, architecture: str, number: Any, refuse: Any) -> dict[str, Any]:
    kind = _field(file, f"{architecture}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": float(number("rope.freq_base", 10000.0)), "rope_type": "default"}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(number("rope.scaling.factor"))}
    elif kind != "none":
        raise refuse(f"rope scaling {kind!r} is not supported; supported are none, linear and llama3")
    return rope


def _write_tokenizer(file: GgufFile, source: Path, folder: Path) -> None:
    """Through transformers, which knows the tokenizers of GGUF; a file without one gives a folder without one."""
    if _field(file, "tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        return
    from transformers import AutoTokenizer

    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(folder)
        except Exception as error:  # transformers raises whatever its converter stumbles over
            raise ConfigError(f"{source.name}: its tokenizer is not supported by transformers: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' remarks on a tokenizer without a model from the user's terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _write_weights(file: GgufFile, config: dict[str, Any], folder: Path, progress: Progress) -> None:
    from safetensors.numpy import save_file

    heads = interleaved_heads(config)
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray[Any, Any]] = {}

    def flush() -> None:
        if shard:
            path = folder / f"part-{len(shards)}.safetensors"
            save_file(shard, path, metadata={"format": "pt"})
            with path.open("rb+") as part:
                os.fsync(part.fileno())
            shards.append(list(shard))
            shard.clear()

    for done, tensor in enumerate(file.tensors.values()):
        shard[stored_name(tensor.name, file.path)] = dequantised(file, tensor, heads)
        if sum(item.nbytes for item in shard.values()) >= _SHARD_BYTES:
            flush()
        progress(f"converting {file.path.name}", (done + 1) / len(file.tensors))
    flush()
    _name_shards(folder, shards)


def interleaved_heads(config: dict[str, Any]) -> dict[str, int]:
    """Heads of the projections whose rotary pairs GGUF interleaves: Llama's only."""
    if config["model_type"] not in ("llama", "mistral"):
        return {}
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}


def dequantised(file: GgufFile, tensor: GgufTensor, heads: dict[str, int]) -> np.ndarray[Any, Any]:
    """A tensor in float32, its rows as transformers orders them."""
    from gguf import GGMLQuantizationType, dequantize

    try:
        weights = dequantize(file.data(tensor), GGMLQuantizationType(tensor.type_number))
    except (NotImplementedError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{file.path.name}: tensor {tensor.name} has the type {tensor.kind}, which gguf cannot dequantise: {error}"
        ) from error
    weights = np.ascontiguousarray(weights, dtype=np.float32).reshape(tensor.shape)
    order = row_order(file, tensor, heads)
    return weights if order is None else weights[order]


def stored_name(name: str, source: Path) -> str:
    """What transformers calls a tensor of the file `source`."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    part = _LAYER_TENSOR.fullmatch(name)
    if part is None or part[2] not in _IN_LAYER:
        raise ConfigError(f"{source.name}: tensor {name} has no place in a model of this kind")
    return f"model.layers.{part[1]}.{_IN_LAYER[part[2]]}.{part[3]}"


def row_order(file: GgufFile, tensor: GgufTensor, heads: dict[str, int]) -> np.ndarray[Any, Any] | None:
    """The rows of a tensor as transformers orders them, where GGUF's Llama converter has interleaved rotary pairs."""
    part = _LAYER_TENSOR.fullmatch(tensor.name)
    if part is None or part[2] not in heads:
        return None
    count, rows = heads[part[2]], tensor.shape[0]
    if count < 1 or rows % (2 * count):
        raise ConfigError(f"{file.path.name}: {tensor.name} has {rows} rows, which {count} heads cannot share")
    return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)


def _name_shards(folder: Path, shards: list[list[str]]) -> None:
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _remove_stale(models: Path) -> None:
    """Remove what converters that were killed left behind."""
    for path in models.glob(".converting-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
