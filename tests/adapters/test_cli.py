"""The command line without an engine: help, errors, exit status, and what is imported when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.processes import environment, pagemill

COMMANDS = (
    *("demo", "serve", "engine", "gateway", "submit", "watch", "cancel"),
    *("batch", "dlq", "webhooks", "hooks", "bench", "doctor", "config", "models", "kernels"),
)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment(), check=False
    )


def test_help_names_every_command_and_needs_nothing_heavy() -> None:
    shown = pagemill("--help")
    assert shown.returncode == 0
    assert all(f"    {command} " in shown.stdout for command in COMMANDS)
    heavy = _python(
        "import sys\nfrom pagemill.adapters.cli.parser import make_parser\nmake_parser().format_help()\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'redis', 'rich', 'structlog', 'asyncio'} & set(sys.modules)))"
    )
    assert heavy.stdout.strip() == "[]", heavy.stderr


@pytest.mark.parametrize(
    "command",
    [
        *((name,) for name in COMMANDS),
        ("bench", "offline"),
        ("models", "prepare"),
        ("kernels", "build"),
        ("dlq", "retry"),
    ],
)
def test_each_command_has_help(command: tuple[str, ...]) -> None:
    shown = pagemill(*command, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: pagemill {' '.join(command)}")


def test_no_command_shows_the_help_and_version_the_version() -> None:
    assert pagemill().stdout == pagemill("--help").stdout
    assert pagemill("--version").stdout.startswith("pagemill 0.")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("confg",), 2, "did you mean config?"),
        (("config", "--blok-size", "3"), 2, "did you mean --block-size?"),
        (("config", "--block", "3"), 2, "unknown option --block"),
        (("config", "extra"), 2, "unexpected 'extra'"),
        (("config", "--block-size", "x"), 2, "'x' is not an integer"),
        (("bench", "offline"), 2, "--workload"),
        (("dlq", "purge"), 2, "or --all"),
        (("dlq", "retry", "1-0", "--all"), 2, "or --all"),
        (("dlq", "list", "--redis-url", "redis://127.0.0.1:1/0"), 3, "cannot be reached"),
        (("bench", "offline", "--workload", "no.jsonl"), 2, "cannot read workload no.jsonl"),
        (("models", "prepare", "no/such-model"), 2, "no/such-model"),
        (("submit", "x", "--max-tokens", "0"), 1, "invalid_request: max_tokens"),
        (("submit", "x", "--max-tokens", "many"), 2, "--max-tokens"),
        (("submit", ""), 1, "invalid_request: prompt"),
        (("submit", "x", "--redis-url", "redis://127.0.0.1:1/0"), 3, "cannot be reached"),
        (("watch", "x", "--redis-url", "redis://127.0.0.1:1/0"), 3, "cannot be reached"),
        (("cancel", "x", "--redis-url", "redis://127.0.0.1:1/0"), 3, "cannot be reached"),
        (("cancel", "no spaces please"), 1, "invalid_request"),
        (("watch", "no spaces please", "--redis-url", "redis://127.0.0.1:1/0"), 1, "invalid_request"),
        (("submit", "x", "--redis-url", "redis://127.0.0.1:port/0"), 2, "redis_url"),
        (("submit", "x", "--redis-url", "redis://127.0.0.1:99999/0"), 2, "redis_url"),
        (("submit", "x", "--redis-url", "redis://[::1/0"), 2, "redis_url"),
        (("engine", "--redis-url", "redis://:pa/ss@127.0.0.1/0"), 2, "%2F"),
        (("engine", "--redis-url", "redis://127.0.0.1:6379/name"), 2, "database number"),
        (("serve", "--data-dir", "/dev/null/x", "--port", "0", "--http-port", "0"), 2, "data_dir /dev/null/x"),
        (("config", "--block-size", "9" * 5000), 2, "is not an integer"),
        (("config", "--settings=--"), 2, "--settings needs a value"),
        (("config", "--settings", "two\nlines"), 2, "two\\nlines"),
        (("config", "--served-model-name", "\udcff"), 2, "served_model_name must be text"),
        (("demo", "--chats", "0"), 2, "--chats"),
        (("hooks", "retry"), 2, "or --all"),
        (("hooks", "disable", "ftp://x"), 1, "callback.url"),
        (("hooks", "list", "--redis-url", "redis://127.0.0.1:1/0"), 3, "cannot be reached"),
        (("hooks", "rotate-secret", "a b"), 2, "secret's name"),
        (("webhooks", "--webhook-delays-s", "5,x"), 2, "webhook_delays_s"),
        (("webhooks", "--webhook-allow", "a/b"), 2, "webhook_allow"),
        (("webhooks", "--webhook-secrets", "/dev/null/x"), 2, "webhook_secrets"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    ran = pagemill(*arguments, cwd=tmp_path)
    assert ran.returncode == status, ran.stderr
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert len(ran.stderr) < 300 and "pa/ss" not in ran.stderr
    assert ran.stdout == ""


def test_an_error_is_no_longer_for_a_value_of_many_digits(tmp_path: Path) -> None:
    ran = pagemill("submit", "x", "--seed", "9" * 5000, cwd=tmp_path)
    assert ran.returncode == 2 and "argument --seed" in ran.stderr and len(ran.stderr) < 1200


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    ran = pagemill("--debug", "config", "--block-size", "0", cwd=tmp_path)
    assert "Traceback" in ran.stderr and ran.returncode == 2


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "not json",
        "[" * 100_000,
        '{"prompt_token_ids": [1], "max_tokens": 1e999}',
        '{"prompt_token_ids": 3, "max_tokens": 1}',
    ],
)
def test_a_bad_workload_is_named_by_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [1], "max_tokens": 1}) + "\n" + line + "\n")
    ran = pagemill("bench", "offline", "--workload", str(file))
    assert ran.returncode == 2
    assert "bad.jsonl:2" in ran.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m pagemill config | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment(), check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_client_imports_neither_torch_nor_transformers() -> None:
    ran = _python(
        "import sys\nfrom pagemill import AsyncClient, Client, RequestError, SamplingParams, __version__\n"
        "assert __version__[0].isdigit()\nSamplingParams(max_tokens=3)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numba', 'numpy'} & set(sys.modules)))"
    )
    assert ran.stdout.strip() == "[]", ran.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    ran = _python("import pagemill\ntry:\n    pagemill.LMM\nexcept AttributeError as error:\n    print(error)")
    assert "LMM" in ran.stdout
    assert _python("import pagemill; assert {'LLM', 'Client'} <= set(dir(pagemill))").returncode == 0


def test_logs_stay_off_the_standard_output_of_a_program_that_uses_the_library() -> None:
    ran = _python(
        "import structlog\nfrom pagemill import SamplingParams\nlog = structlog.get_logger('x')\n"
        "log.info('detail')\nlog.warning('careful')"
    )
    assert ran.stdout == "" and "careful" in ran.stderr and "detail" not in ran.stderr
    ran = _python(
        "import structlog\nstructlog.configure()\nfrom pagemill import SamplingParams\n"
        "structlog.get_logger('x').info('detail')"
    )
    assert "detail" in ran.stdout, "a program's own choice stays"


def test_output_that_the_terminal_cannot_show_is_no_error(tmp_path: Path) -> None:
    ran = pagemill("config", "--queue", "q", "--served-model-name", "客", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert ran.returncode == 0 and "\\u5ba2" in ran.stdout


def test_the_engine_says_what_to_install_where_it_is_missing() -> None:
    ran = _python(
        "import sys\nsys.modules['torch'] = None\n"
        "try:\n    from pagemill import LLM\nexcept ImportError as error:\n    print(error)"
    )
    assert "pagemill[engine]" in ran.stdout, ran.stderr
