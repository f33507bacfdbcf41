"""`pagemill kernels build`: compile the CPU kernels before the first start, for images and read-only installations.

An engine is made and thrown away, so that what is compiled is what an engine compiles, whatever that is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError

_FORMS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))
"""dtype and quantization of what is built for where neither is said."""


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Raises `ConfigError` where the kernels would not be kept in the folder asked for."""
    config = settings.engine(device="cpu")
    if config.device != "cpu":
        raise ConfigError(
            f"device must be cpu for kernels build, got {config.device}: CUDA's compile on the GPU's machine"
        )
    config = config.replace(num_blocks_override=8, max_model_len=64, max_num_seqs=4)
    if settings.is_given("model"):
        return _build([config])
    from pagemill.engine.blank_model import write_blank_llama

    said = settings.is_given("dtype") or settings.is_given("quantization")
    forms = ((config.dtype, config.quantization),) if said else _FORMS
    with tempfile.TemporaryDirectory(prefix="pagemill-blank-") as folder:
        write_blank_llama(Path(folder))
        return _build([config.replace(model=folder, dtype=dtype, quantization=form) for dtype, form in forms])


def _build(configs: list[EngineConfig]) -> int:
    from pagemill.engine.loader import resolve_model
    from pagemill.engine.model_runner import ModelRunner
    from pagemill.engine.quantization import keeps_gguf
    from pagemill.kernels.ops import numba_problem

    if problem := numba_problem():
        raise ConfigError(f"there are no kernels to build here: {problem}")
    from pagemill.kernels.cpu.ops import CpuOps
    from pagemill.kernels.cpu.target import instructions, processor

    kept = _folder(configs[0])
    compiled: dict[str, float] = {}
    loaded = 0
    for config in configs:
        with progress_bar() as progress:
            convert = not keeps_gguf(config)
            folder = resolve_model(config.model, config.cache_dir, progress, convert_weights=convert)
            ops = ModelRunner(config, folder, progress).ops
        assert isinstance(ops, CpuOps)
        if ops.cache.folder != kept:
            raise ConfigError(f"compiled kernels could not be kept in {kept}: it cannot be written any more")
        compiled |= ops.cache.compiled
        loaded += ops.cache.loaded
    size = sum(file.stat().st_size for file in kept.iterdir()) / 1e6
    print(
        f"{len(compiled)} kernels compiled in {sum(compiled.values()):.1f} s, {loaded} were there; {kept} holds "
        f"{size:.1f} MB, for {processor()}: {instructions()}"
    )
    return 0


def _folder(config: EngineConfig) -> Path:
    """Where the kernels will lie. Raises `ConfigError` where that is not below the folder asked for."""
    from pagemill.engine.loader import cache_folder
    from pagemill.kernels.cpu.kernel_cache import KernelCache

    folder, asked = KernelCache(config.cache_dir).folder, cache_folder(config.cache_dir)
    if folder is None or asked not in folder.parents:
        raise ConfigError(f"cache_dir must be a folder that we can write and nobody else can, got {asked}")
    return folder
