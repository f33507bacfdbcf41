"""`pagemill doctor`: whether this machine, its model and its server are fit to serve, one line a check."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import platform
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings, without_password
from pagemill.engine.errors import ConfigError

Verdict = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. "note" is worth knowing and no failure."""

    verdict: Verdict
    subject: str
    text: str


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if any check failed, else 0."""
    failed = 0
    checks: dict[str, Callable[[Settings], Iterator[Finding]]]
    checks = {"python": _python, "server": _server, "port": ports}
    checks |= {"device": _device, "kernels": _kernels, "model": _model_and_memory}
    for subject, check in checks.items():
        try:
            for finding in check(settings):
                failed += finding.verdict == "fail"
                print(f"{finding.verdict:<5} {finding.subject:<10} {finding.text}", flush=True)
        except ConfigError as error:
            failed += 1
            print(f"{'fail':<5} {subject:<10} {error}", flush=True)
        except ModuleNotFoundError as error:
            failed += 1
            print(f"{'fail':<5} {subject:<10} {error.name} is not installed", flush=True)
    print(f"{failed} failed" if failed else "all checks passed")
    return 1 if failed else 0


def _python(settings: Settings) -> Iterator[Finding]:
    names = ("torch", "transformers", "numba", "redis", "triton")
    found = {name: _version(name) for name in names}
    packages = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.machine()}; {packages}")
    missing = [name for name in ("torch", "transformers", "redis") if not found[name]]
    if missing:
        yield Finding("fail", "python", f"missing: {', '.join(missing)}; pip install 'pagemill[engine]'")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server(settings: Settings) -> Iterator[Finding]:
    """The server given, or the embedded one, which has the right settings because we start it."""
    from pagemill.ingest.embedded import find_server
    from pagemill.ingest.redis import MIN_VERSION

    if not settings.is_given("redis_url"):
        yield Finding("ok", "server", f"no redis_url is set: `pagemill serve` starts its own, {find_server()}")
        return
    import redis

    url = settings.queue().redis_url
    shown = without_password(url)
    try:
        info = asyncio.run(_info(url))
    except (redis.RedisError, OSError) as error:
        yield Finding("fail", "server", f"{shown} cannot be reached: {error}")
        return
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version", info["redis_version"]))
    speaks = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    yield Finding(
        "ok" if speaks >= MIN_VERSION else "fail",
        "server",
        f"{shown} is {name} {version}" + ("" if speaks >= MIN_VERSION else "; 7.0 is the least, or Valkey 7.2"),
    )
    policy = info.get("maxmemory_policy")
    yield Finding(
        "ok" if policy == "noeviction" else "fail",
        "server",
        f"maxmemory-policy is {policy}"
        + ("" if policy == "noeviction" else ": requests may vanish under memory pressure; set it to noeviction"),
    )
    kept = bool(info.get("aof_enabled"))
    yield Finding(
        "ok" if kept else "fail",
        "server",
        "appendonly is on" if kept else "appendonly is off: a restart loses requests; set appendonly yes",
    )
    limit = int(info.get("maxmemory", 0))
    if limit and int(info["used_memory"]) > 0.8 * limit:
        yield Finding("note", "server", f"{info['used_memory']} of {limit} bytes (maxmemory) are in use")
    if info.get("role") != "master":
        yield Finding("fail", "server", f"it is a {info.get('role')}: writes need the primary")


async def _info(url: str) -> dict[str, Any]:
    from pagemill.ingest.redis import connect_commands

    async with connect_commands(url, "pagemill-doctor") as client:
        info: dict[str, Any] = await client.info()
        return info


def ports(settings: Settings) -> Iterator[Finding]:
    """Whether the embedded server can have its port."""
    port = settings.process().port
    if settings.is_given("redis_url") or port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Finding(
                "fail",
                "port",
                f"{port} on 127.0.0.1 is taken ({error.strerror}), so `pagemill serve` cannot start its server there; "
                f"use the one that runs (--redis-url redis://127.0.0.1:{port}/0) or another --port",
            )
            return
    yield Finding("ok", "port", f"{port} on 127.0.0.1 is free for the embedded server")


def _device(settings: Settings) -> Iterator[Finding]:
    import torch

    wanted = settings.engine().device
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        yield Finding("ok", "device", f"cuda: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    elif wanted == "cuda":
        yield Finding("fail", "device", "device is cuda, and no usable CUDA device is here")
    else:
        from pagemill.engine import openmp
        from pagemill.engine.machine import available_cores, processor_features

        openmp.let_go()  # as an engine does
        wide = [name for name in sorted(processor_features()) if "bf16" in name or name in ("avx2", "avx512f", "sve")]
        yield Finding("ok", "device", f"cpu: {available_cores()} cores, {', '.join(wide) or 'no wide instructions'}")


def _kernels(settings: Settings) -> Iterator[Finding]:
    """Run the smallest operation of the chosen back end, so that what is reported is what works."""
    import torch

    from pagemill.kernels.ops import numba_problem, select_ops

    config = settings.engine()
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    ops = select_ops(device, threads=config.threads, cache_dir=config.cache_dir)
    try:
        ones = torch.ones(2, 64, device=device)
        right = bool(torch.allclose(ops.rms_norm(ones, ones[0], 1e-6), ones, atol=1e-3))
    except Exception as error:  # whatever a broken installation raises is the finding
        yield Finding("fail", "kernels", f"{ops.name}: {type(error).__name__}: {error}")
        return
    yield Finding("ok" if right else "fail", "kernels", f"{ops.name} back end computes{_how(ops)}")
    if ops.name == "torch":
        yield Finding("note", "kernels", f"plain torch is used, which is slower: {numba_problem()}")
    if ops.name == "cpu":
        yield _compiled(ops)


def _how(ops: Any) -> str:
    """What the CPU kernels are compiled for, and why so."""
    if ops.name != "cpu":
        return ""
    import numba

    from pagemill.kernels.cpu.target import instructions, processor

    return f": numba {numba.__version__} for {processor()}, {instructions()}, {ops.threads} threads"


def _compiled(ops: Any) -> Finding:
    cache = ops.cache
    if cache.folder is None:
        return Finding("note", "kernels", "compiled code cannot be kept: every start compiles for some 15 s")
    count = sum(1 for path in cache.readable for _ in path.glob("*.kernel"))
    held = f"{count} compiled kernels" if count else "no compiled kernels yet: the first start takes some 15 s more"
    return Finding("ok", "kernels", f"{held} in {', '.join(str(path) for path in cache.readable)}")


def _model_and_memory(settings: Settings) -> Iterator[Finding]:
    from pagemill.engine.loader import resolve_model
    from pagemill.engine.machine import memory_limit
    from pagemill.engine.quantization import form_of, keeps_gguf
    from pagemill.engine.tokenizer import Tokenizer

    config = settings.engine()
    with progress_bar() as progress:
        folder = resolve_model(config.model, config.cache_dir, progress, convert_weights=not keeps_gguf(config))
    weights = sum(file.stat().st_size for file in folder.weight_files)
    form = form_of(config, folder)
    yield Finding(
        "ok", "model", f"{folder.name}: {folder.architecture}, {form}, {weights / 2**20:.0f} MiB, in {folder.path}"
    )
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.from_folder(folder.path)
        chat = "with" if tokenizer.has_chat_template else "without"
        yield Finding("ok", "model", f"tokenizer of {tokenizer.vocab_size} tokens, {chat} a chat template")
    limit = memory_limit() * config.gpu_memory_utilization
    verdict: Verdict = "ok" if weights < limit else "fail"
    yield Finding(verdict, "memory", f"{limit / 2**30:.1f} GiB may be used, weights take {weights / 2**30:.2f} GiB")
