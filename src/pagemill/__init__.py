"""Pagemill: a queue-driven LLM engine. Requests on Redis streams, a paged KV cache, token deltas back over pub/sub.

    from pagemill import LLM, SamplingParams        # inference in this process
    from pagemill import Client, AsyncClient        # producers: needs redis and orjson, neither torch nor transformers

Names are loaded on first use, so that a producer does not pay for the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.engine.errors import RequestError
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams
    from pagemill.engine.structured_outputs import StructuredOutputs
    from pagemill.ingest.client import AsyncClient, Client

    __version__: str

__all__ = ["LLM", "AsyncClient", "Client", "RequestError", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "pagemill.engine.llm",
    "SamplingParams": "pagemill.engine.sampling_params",
    "StructuredOutputs": "pagemill.engine.structured_outputs",
    "RequestError": "pagemill.engine.errors",
    "Client": "pagemill.ingest.client",
    "AsyncClient": "pagemill.ingest.client",
}
_ENGINE_PACKAGES = frozenset(("torch", "transformers", "tokenizers", "numpy", "safetensors", "psutil", "llguidance"))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagemill' has no attribute {name!r}")
    _keep_logs_quiet()
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name in _ENGINE_PACKAGES:
            message = f"pagemill.{name} needs the engine ({error.name} is missing): pip install 'pagemill[engine]'"
            raise ImportError(message) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _keep_logs_quiet() -> None:
    """A program that has not set structlog up gets warnings on standard error, not every line on standard output."""
    import logging
    import sys

    import structlog

    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0+unknown"
