"""Log lines on standard error: readable on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from pagemill.adapters.cli.settings import ProcessConfig


def _standard_error(*_: object) -> structlog.PrintLogger:
    """Asked for at every line, so that whoever redirects standard error gets the lines."""
    return structlog.PrintLogger(sys.stderr)


def set_up_logging(config: ProcessConfig) -> None:
    """Route structlog and the libraries' own loggers through one renderer."""
    human = config.log_format == "human" or (config.log_format == "auto" and sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
    ]
    renderer: Processor
    if human:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_standard_error,
    )
    handler = logging.StreamHandler(sys.stderr)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak of their own business at info; what concerns an operator is a warning.
    root.setLevel(max(level, logging.WARNING))
