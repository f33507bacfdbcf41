"""`pagemill models prepare`: convert a model once, so that engines find it ready."""

from __future__ import annotations

import argparse

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings


def run(args: argparse.Namespace, settings: Settings) -> int:
    from pagemill.engine.loader import resolve_model
    from pagemill.engine.quantization import keeps_gguf

    config = settings.engine()
    with progress_bar() as progress:
        keep = keeps_gguf(config)
        folder = resolve_model(args.name or config.model, config.cache_dir, progress, convert_weights=not keep)
    size = sum(file.stat().st_size for file in folder.weight_files)
    place = f"in {folder.path}"
    if folder.weight_files[0].suffix == ".gguf":
        place += f", its weights stay in {folder.weight_files[0]}"
    print(f"{folder.name} is ready {place} ({folder.architecture}, {size / 1e6:.0f} MB of weights)")
    return 0
