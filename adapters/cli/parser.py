"""The commands and their flags. Light: no command's code is imported here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pagemill.adapters.cli.foreign_words import error_line
from pagemill.adapters.cli.request_flags import BODY_PREFIX, add_request_flags
from pagemill.adapters.cli.settings import Group, Setting, nearest, settings_table
from pagemill.adapters.cli.simulate_flags import add_flags as add_simulate_flags

EPILOG = """\
settings:
  Every setting is a flag (--block-size 32), an environment variable (PAGEMILL_BLOCK_SIZE=32) and a line of
  pagemill.toml (block_size = 32); flags win over variables, variables over the file. `pagemill config` shows them all.

exit status:
  0 done   1 a request, a check or the engine failed   2 wrong command line, settings or model
  3 the queue cannot be reached, or nobody answered in time   130 interrupted
"""

_GROUP_TITLES: dict[Group, str] = {
    "engine": "engine settings",
    "queue": "queue settings",
    "gateway": "gateway settings",
    "webhook": "webhook settings",
    "process": "process settings",
}
SETTING_PREFIX = "setting:"


class Parser(argparse.ArgumentParser):
    """Errors are one line that says what to do, exit status 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {error_line(message)} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def make_parser() -> Parser:
    parser: Parser = _new(
        None,
        "pagemill",
        "An LLM engine fed from a queue. Start with `pagemill demo`; then `pagemill serve` in one terminal and "
        "`pagemill submit 'Hello'` in another.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    _add_common(parser)
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _demo(commands)
    _serve(commands)
    _submit(commands)
    _watch(commands)
    _batch(commands)
    _dlq(commands)
    _webhooks(commands)
    _bench(commands)
    _tools(commands)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Exits with 2 on what is not understood, naming the nearest flag or command."""
    parser = make_parser()
    known = _commands(parser)
    words = [word for word in arguments if not word.startswith("-")]
    if words and not any(word in known for word in words) and arguments[0] == words[0]:
        parser.error(f"unknown command {words[0]!r}{nearest(words[0], known)}")
    for word in arguments:
        if word.startswith("--") and word.endswith("=--"):
            parser.error(
                f"{word.removesuffix('=--')} needs a value, -- is none"
            )  # argparse would take it for an empty list
    args, rest = parser.parse_known_args(arguments)
    if rest:
        chosen = known.get(args.command, parser)
        flag = rest[0].split("=")[0]
        flags = [option for action in chosen._actions for option in action.option_strings]
        if flag.startswith("-"):
            chosen.error(f"unknown option {flag}{nearest(flag, flags)}")
        chosen.error(f"unexpected {rest[0]!r}")
    return args


def given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Settings given as flags, by name."""
    return _with_prefix(args, SETTING_PREFIX)


def given_body(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a request given as flags, by name."""
    return _with_prefix(args, BODY_PREFIX)


def _with_prefix(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    found = {key.removeprefix(prefix): value for key, value in vars(args).items() if key.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}


def _commands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _new(commands: Any, name: str, summary: str, **options: Any) -> Any:
    options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    if commands is None:
        return Parser(prog=name, description=_wrapped(summary), **options)
    return commands.add_parser(name, help=summary, description=_wrapped(summary[0].upper() + summary[1:]), **options)


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 100)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", metavar="FILE", default=argparse.SUPPRESS, help="settings file, default ./pagemill.toml"
    )
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show a traceback for errors")


def _add_settings(parser: argparse.ArgumentParser, *groups: Group) -> None:
    _add_common(parser)
    sections = {group: parser.add_argument_group(_GROUP_TITLES[group]) for group in groups}
    for setting in settings_table().values():
        if setting.group in sections:
            _add_setting(sections[setting.group], setting)


def _add_setting(section: Any, setting: Setting) -> None:
    dest, text = SETTING_PREFIX + setting.name, setting.help.replace("%", "%%")
    if setting.default is not None:
        shown = str(setting.default).lower() if setting.kind is bool else setting.default
        text += f" (default {shown})"
    if setting.kind is not bool:
        section.add_argument(setting.flag, dest=dest, metavar=setting.kind.__name__.upper(), help=text)
        return
    section.add_argument(setting.flag, dest=dest, nargs="?", const="true", metavar="BOOL", help=text)
    section.add_argument(
        setting.flag.replace("--", "--no-", 1), dest=dest, action="store_const", const="false", help=argparse.SUPPRESS
    )


def _demo(commands: Any) -> None:
    parser = _new(
        commands,
        "demo",
        "the whole product at work: an embedded Valkey, an engine, a gateway and clients in one process; streams "
        "prompts through the queue, prints a table, exits",
    )
    parser.add_argument("--chats", type=int, default=8, metavar="N", help="chat requests behind one system prompt (8)")
    _add_settings(parser, "engine", "process")


def _serve(commands: Any) -> None:
    parser = _new(
        commands,
        "serve",
        "an engine, a gateway and a sender of webhooks on an embedded Valkey, or on the server given by --redis-url, "
        "until Ctrl-C or SIGTERM",
    )
    _add_settings(parser, "engine", "queue", "gateway", "webhook", "process")
    parser = _new(commands, "engine", "an engine alone, on the server given by --redis-url; run as many as you like")
    _add_settings(parser, "engine", "queue", "process")
    parser = _new(commands, "gateway", "HTTP over the queue at --redis-url: OpenAI's routes and native ones")
    _add_settings(parser, "queue", "gateway", "process")


def _submit(commands: Any) -> None:
    parser = _new(commands, "submit", "push one request and print its text as it comes")
    parser.add_argument("prompt", nargs="?", help="the prompt; `-` or nothing reads standard input")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's chat message")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of it (implies --chat)")
    parser.add_argument("--detach", action="store_true", help="print the request's id and do not wait")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object at the end")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up waiting after S seconds")
    body = add_request_flags(parser)
    _add_models(body)
    _add_settings(parser, "queue", "process")


def _add_models(section: Any) -> None:
    _add_setting(section, settings_table()["models"])


def _watch(commands: Any) -> None:
    parser = _new(commands, "watch", "print a request's text from its beginning, then as it comes")
    parser.add_argument("id", help="the request's id")
    parser.add_argument("--json", action="store_true", help="print every event as a JSON line")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up waiting after S seconds")
    _add_whose_queue(parser)
    _add_settings(parser, "queue", "process")
    parser = _new(commands, "cancel", "cancel a request, waiting or running")
    parser.add_argument("id", help="the request's id")
    _add_whose_queue(parser)
    _add_settings(parser, "queue", "process")


def _add_whose_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="the request's model, where `models` names several queues")
    _add_models(parser)


def _dlq(commands: Any) -> None:
    parser = _new(commands, "dlq", "dead letters: entries that nobody could answer, requests that ended their engines")
    kinds = parser.add_subparsers(dest="dlq", metavar="ACTION", title="actions", required=True)
    actions = {
        "list": "list them, the oldest first",
        "show": "print one with all of its fields",
        "retry": "submit their requests again, under new ids, and remove them",
        "purge": "remove them",
    }
    for name, summary in actions.items():
        action = _new(kinds, name, summary)
        if name == "show":
            action.add_argument("id", help="the letter's id, as `list` shows it")
        elif name in ("retry", "purge"):
            action.add_argument("ids", nargs="*", metavar="ID", help="letters' ids, as `list` shows them")
            action.add_argument("--all", action="store_true", help="all of them")
        if name in ("list", "show"):
            action.add_argument("--json", action="store_true", help="one JSON object a line")
        _add_settings(action, "queue", "process")


def _batch(commands: Any) -> None:
    parser = _new(
        commands, "batch", "a file of requests through the queue, answers in the same order; goes on after a crash"
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="lines as OpenAI's batch files have them, or bare bodies")
    parser.add_argument("--output", metavar="FILE", help="answers; default FILE.out.jsonl")
    parser.add_argument("--errors", metavar="FILE", help="what could not be answered; default FILE.errors.jsonl")
    parser.add_argument("--window", type=int, default=64, metavar="N", help="lines under way at one time (64)")
    parser.add_argument("--model", metavar="NAME", help="instead of the model that the lines name")
    _add_settings(parser, "queue", "process")


def _webhooks(commands: Any) -> None:
    parser = _new(commands, "webhooks", "send webhooks: signed, with retries; run as many as you like")
    _add_settings(parser, "queue", "webhook", "process")
    parser = _new(commands, "hooks", "webhooks that wait or were given up, URLs that are off, signing secrets")
    kinds = parser.add_subparsers(dest="hooks", metavar="ACTION", title="actions", required=True)
    actions = {
        "list": "list what waits, what was given up, and URLs that are off",
        "retry": "send again what was given up",
        "disable": "send nothing to a URL any more",
        "enable": "send to a URL again",
        "rotate-secret": "make a new signing secret and print it; the old one signs beside it for a while",
    }
    for name, summary in actions.items():
        action = _new(kinds, name, summary)
        if name == "list":
            action.add_argument("--json", action="store_true", help="one JSON object a line")
        elif name == "retry":
            action.add_argument("ids", nargs="*", metavar="ID", help="webhooks' ids, as `list` shows them")
            action.add_argument("--all", action="store_true", help="all of them")
        if name in ("list", "retry"):
            action.add_argument("--tenant", metavar="NAME", help="only those of one tenant (retry: with --all)")
        elif name == "rotate-secret":
            action.add_argument("name", nargs="?", default="default", help="the secret's name (default)")
            action.add_argument("--keep-h", type=float, default=24.0, metavar="H", help="hours for the old one (24)")
        else:
            action.add_argument("url", help="the callback's URL, whole")
        groups: tuple[Group, ...] = ("webhook", "process") if name == "rotate-secret" else ("queue", "process")
        _add_settings(action, *groups)


def _bench(commands: Any) -> None:
    parser = _new(commands, "bench", "measure this machine")
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", title="benchmarks", required=True)
    offline = _new(kinds, "offline", "throughput of workload files without a queue: all requests at once, greedy")
    offline.add_argument(
        "--workload",
        action="append",
        required=True,
        metavar="FILE.jsonl",
        help='lines of {"prompt_token_ids": [...], "max_tokens": n}; may be given several times',
    )
    offline.add_argument("--json", action="store_true", help="one JSON object a file, nothing else, on standard output")
    _add_settings(offline, "engine", "process")
    step = _new(kinds, "step", "where the time of a workload's steps goes, part by part, against the machine's limits")
    step.add_argument("--workload", required=True, metavar="FILE.jsonl", help="as for `bench offline`")
    step.add_argument("--temperature", type=float, default=0.8, metavar="T", help="of all requests (0.8)")
    step.add_argument("--json", action="store_true", help="the tables as JSON")
    _add_settings(step, "engine", "process")
    simulate = _new(
        kinds,
        "simulate",
        "a recorded trace through the engine's scheduler and block pool, on a modelled device instead of a model",
    )
    add_simulate_flags(simulate)
    _add_common(simulate)


def _tools(commands: Any) -> None:
    parser = _new(commands, "doctor", "check the server's settings, model, device, kernels, memory and ports")
    _add_settings(parser, "engine", "queue", "process")
    parser = _new(commands, "config", "print every setting, its value and where that came from")
    _add_settings(parser, "engine", "queue", "gateway", "webhook", "process")
    parser = _new(commands, "models", "models on this machine")
    kinds = parser.add_subparsers(dest="models", metavar="ACTION", title="actions", required=True)
    prepare = _new(kinds, "prepare", "convert and cache a model, so that engines start at once")
    prepare.add_argument(
        "name", nargs="?", help="folder, .gguf file, cached Hugging Face name; default: the model setting"
    )
    _add_settings(prepare, "engine", "process")
    parser = _new(commands, "kernels", "the CPU's compiled kernels")
    kinds = parser.add_subparsers(dest="kernels", metavar="ACTION", title="actions", required=True)
    build = _new(
        kinds,
        "build",
        "compile all that an engine needs into --cache-dir, so that none compiles at its start: for images. Without "
        "--model: for any model of Llama's kind",
    )
    _add_settings(build, "engine", "process")
