"""Runs a command and turns what goes wrong into one line and an exit status."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from pagemill.adapters.cli.foreign_words import error_line
from pagemill.adapters.cli.parser import given_settings, make_parser, parse
from pagemill.adapters.cli.settings import load_settings
from pagemill.adapters.cli.status import DONE, FAILED, INTERRUPTED, UNREACHABLE, USAGE, UnreachableError
from pagemill.engine.errors import ConfigError, EngineDeadError, RequestError

_MODULES = {
    "demo": "demo",
    "serve": "serve",
    "engine": "serve",
    "gateway": "gateway_command",
    "submit": "client_commands",
    "watch": "client_commands",
    "cancel": "client_commands",
    "dlq": "dlq_command",
    "batch": "batch_command",
    "webhooks": "webhooks_command",
    "hooks": "hooks_command",
    "bench": "bench",
    "doctor": "doctor",
    "config": "config_command",
    "models": "models",
    "kernels": "kernels_command",
}


def run(arguments: Sequence[str]) -> int:
    """Run `pagemill` with these arguments; return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a generation
    args = parse(arguments)
    if args.version:
        import pagemill

        print(f"pagemill {pagemill.__version__}")
        return DONE
    if args.command is None:
        make_parser().print_help()
        return DONE
    try:
        return _run_command(args)
    except Exception as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        status, message = _explain(error)
        print(f"pagemill: {error_line(message)}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_command(args: argparse.Namespace) -> int:
    from pagemill.adapters.cli.logs import set_up_logging

    settings = load_settings(given_settings(args), os.environ, getattr(args, "settings", None))
    # Commands that show their own output on the terminal speak up in the log only when something is wrong.
    quiet = args.command not in ("serve", "engine", "gateway", "webhooks")
    set_up_logging(settings.process(**({"log_level": "warning"} if quiet else {})))
    module = importlib.import_module(f"pagemill.adapters.cli.{_MODULES[args.command]}")
    try:
        status: int = module.run(args, settings)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (head, say) has what it wanted. Point stdout elsewhere, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, RequestError):
        return FAILED, f"{error.code}: {error.message}"
    if isinstance(error, EngineDeadError):
        return FAILED, str(error)
    if isinstance(error, ConfigError):
        return USAGE, str(error)
    if isinstance(error, ModuleNotFoundError):
        part = "gateway" if error.name in ("aiohttp", "prometheus_client") else "engine"
        return USAGE, f"{error.name} is not installed; the {part} needs: pip install 'pagemill[{part}]'"
    if isinstance(error, TimeoutError):
        return UNREACHABLE, f"no answer in time{f': {error}' if str(error) else ''}"
    if isinstance(error, UnreachableError):
        return UNREACHABLE, f"the queue cannot be reached: {error}"
    if isinstance(error, OSError):
        return FAILED, str(error)  # the disk is full, a file may not be written: the machine's affair, no fault
    return FAILED, f"unexpected {type(error).__name__}: {error} (--debug shows where)"
