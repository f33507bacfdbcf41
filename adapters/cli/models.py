"""`pagemill models prepare`: convert a model once, so that engines find it ready."""

from __future__ import annotations

import argparse

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings


def run(args: argparse.Namespace, settings: Settings) -> int:
    from pagemill.engine.loader import resolve_model

    config = settings.engine()
    with progress_bar() as progress:
        folder = resolve_model(args.name or config.model, config.cache_dir, progress)
    size = sum(file.stat().st_size for file in folder.weight_files)
    print(f"{folder.name} is ready in {folder.path} ({folder.architecture}, {size / 1e6:.0f} MB of weights)")
    return 0
