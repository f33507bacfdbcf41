"""The container files, as far as they can be checked without a container engine: what a linter of them would say, that
what they name exists, and that their commands and settings are ours. The health check is run for real."""

from __future__ import annotations

import http.server
import importlib.util
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml

from pagemill.adapters.cli.parser import parse
from pagemill.adapters.cli.settings import load_settings, settings_table
from tests.adapters.processes import environment

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        if name:
            found[name].append((word, rest))
    return found


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return loaded


def load_healthcheck() -> Any:
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_are_pinned_and_unprivileged() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    built = stages()
    for name, parts in built.items():
        base = parts[0][1].split(" AS ")[0]
        for key, value in arguments.items():
            base = base.replace(f"${{{key}}}", value)
        if base not in built:
            assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[a-z0-9.-]*", base), f"{name} starts from {base}"
    for target in ("cpu", "cuda"):
        assert built[target][0][1].startswith("runtime ")
        users = [rest for word, rest in built[target] if word == "USER"]
        assert users == ["10001:10001"]
        # What is written to a volume after it was declared is lost, so that comes last.
        assert built[target][-1] == ("VOLUME", '["/models", "/secrets"]')
    assert {word for word, _ in built["runtime"]} >= {"HEALTHCHECK", "ENTRYPOINT"}
    assert ("RUN", "pagemill kernels build") in built["cpu"]
    assert not {word for word, _ in instructions()} & {"ADD", "MAINTAINER", "ONBUILD"}


def test_what_is_installed_is_pinned_and_leaves_nothing_behind() -> None:
    for word, rest in instructions():
        if word != "RUN":
            continue
        for command in rest.split("&&"):
            words = command.split()
            if words[:2] == ["pip", "install"]:
                assert "--constraint" in words, command
            assert words[0] not in ("sudo", "curl", "wget"), command
            if words[:2] == ["apt-get", "install"]:
                assert {"--yes", "--no-install-recommends"} <= set(words)
        if "apt-get" in rest:
            assert rest.startswith("apt-get update") and rest.endswith("rm -rf /var/lib/apt/lists/*")
    assert any(word == "ENV" and "PIP_NO_CACHE_DIR=1" in rest for word, rest in instructions())


def test_a_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("no hadolint")
    ran = subprocess.run([hadolint, "--no-color", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


def test_the_compose_files_are_what_the_specification_says() -> None:
    """Unknown names, wrong types, and networks and volumes that nothing declares are refused."""
    specification = pytest.importorskip("compose_spec")
    reading = specification.PyOptions()
    reading.apply_merge = True
    for name in ("compose.yaml", "compose.cuda.yaml"):
        reading.from_yaml((DOCKER / name).read_text()).validate()
    with pytest.raises(ValueError, match="comand"):
        reading.from_yaml("services: {engine: {image: x, comand: [engine]}}")


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == name or source.startswith(f"{name}/") for name in allowed), source
    for name in allowed:
        assert (ROOT / name).exists(), name
    # The folders that the package is linked together from are all there.
    copied = {rest.split()[0] for word, rest in instructions() if word == "COPY"}
    links = {path.resolve().name for path in (ROOT / "src" / "pagemill").iterdir() if path.is_symlink()}
    assert links <= copied


def test_settings_and_commands_are_ours() -> None:
    table = {setting.variable for setting in settings_table().values()}
    for word, rest in instructions():
        if word == "ENV":
            assert set(re.findall(r"PAGEMILL_\w+", rest)) <= table
    for name, service in compose()["services"].items():
        environment = service.get("environment", {})
        assert {key for key in environment if key.startswith("PAGEMILL_")} <= table
        if name == "valkey":
            continue
        args = parse(service["command"])
        assert args.command == name
        values = {
            key: re.sub(r"\$\{\w+:(-|\?)(.*)\}", lambda found: found[2] if found[1] == "-" else "me=" + "k" * 32, value)
            for key, value in environment.items()
        }
        settings = load_settings({}, values)
        settings.engine(), settings.queue(), settings.gateway(), settings.webhook(), settings.process()
        # Docker kills what is not gone by then.
        grace = float(service["stop_grace_period"].removesuffix("s"))
        needed = {"engine": settings.queue().drain_timeout_s, "webhooks": settings.webhook().webhook_timeout_s}
        assert grace > needed.get(name, 0) + 5


def test_services_are_guarded() -> None:
    file = compose()
    services = file["services"]
    assert set(services) == {"valkey", "engine", "gateway", "webhooks"}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped" and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"] and not service.get("privileged")
        assert not service["image"].endswith(":latest") and ":" in service["image"]
        assert set(service["networks"]) <= set(file["networks"])
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in file["volumes"], volume
        if name != "valkey":
            assert service["read_only"] and service["init"]
            assert service["depends_on"] == {"valkey": {"condition": "service_healthy"}}
            assert service["build"]["target"] in stages()
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    valkey = services["valkey"]
    command = " ".join(valkey["command"])
    assert "--appendonly yes" in command and "--maxmemory-policy noeviction" in command
    assert "ports" not in valkey and valkey["networks"] == ["inside"] and file["networks"]["inside"]["internal"]
    assert valkey["healthcheck"]["test"][0] == "CMD" and re.search(r":\d+\.\d+\.\d+", valkey["image"])
    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])
    with_gpu = compose("compose.cuda.yaml")["services"]
    assert set(with_gpu) <= set(services) and with_gpu["engine"]["build"]["target"] == "cuda"


def test_the_health_check(redis_url: str, valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = load_healthcheck()
    assert check.role_of(["/sbin/docker-init", "--", "pagemill", "engine", "--queue", "gateway"]) == "engine"
    assert check.role_of(["python", "/opt/pagemill/bin/pagemill", "webhooks"]) == "webhooks"
    assert check.role_of(["bash"]) is None
    url = f"redis://127.0.0.1:{valkey.port}/0"
    with pytest.raises(RuntimeError, match="no sender"):
        check.check_webhooks(url, "pm", "default")
    with pytest.raises(RuntimeError, match="no engine"):
        check.check_engine(url, "pm", "default")
    with redis.Redis.from_url(redis_url) as client:
        now = time.time() * 1000
        client.zadd("pm:{default.0}:hb", {"other-1-a": now, f"{socket.gethostname()[:32]}-7-ab": now - 60_000})
        with pytest.raises(RuntimeError, match="ms without one"):
            check.check_engine(url, "pm", "default")
        client.zadd("pm:{default.0}:hb", {f"{socket.gethostname()[:32]}-8-cd": now})
        check.check_engine(url, "pm", "default")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        check.check_http(server.server_port)
        server.shutdown()
        thread.join()
    with pytest.raises(OSError):
        check.check_http(server.server_port)
    assert check.main() == 0, "process 1 of this machine has no role"


def test_the_health_check_of_process_1(redis_url: str, valkey: Any) -> None:
    """As in a container: the role is process 1 of a process namespace, in which the image's check is run."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no process namespaces here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = environment(PAGEMILL_REDIS_URL=f"redis://127.0.0.1:{valkey.port}/0", PAGEMILL_HTTP_PORT=port)
    command = [*namespace, sys.executable, "-m", "pagemill", "gateway"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=settings) as outer:
        assert outer.stdout is not None and outer.stdout.readline()
        (role,) = psutil.Process(outer.pid).children()
        try:
            check = ["nsenter", "-t", str(role.pid), "-p", "-m", sys.executable, str(DOCKER / "healthcheck.py")]
            for act, status in ((role.resume, 0), (role.suspend, 1), (role.resume, 0)):
                act()
                # Its own time limit is short: on a busy machine it may say once that a healthy gateway is not.
                until = time.monotonic() + 60
                while subprocess.run(check, env=settings, capture_output=True, timeout=60).returncode != status:
                    assert time.monotonic() < until, status
        finally:
            role.kill()
