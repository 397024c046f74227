"""A Redis server of the benchmark's own, on loopback, with nothing on disk; it ends with the benchmark, however that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 10  # for the server to answer


def why_not() -> str | None:
    """What is missing; None: nothing."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: apt-get install redis-server)"
    if importlib.util.find_spec("redis") is None:
        return "the package redis is not installed (pip install 'sic_kernels[bench]')"
    return None


@contextlib.contextmanager
def clients() -> Iterator[dict[str, Any]]:
    """Two clients of one server, by TCP and by a Unix socket."""
    import redis

    with tempfile.TemporaryDirectory(prefix="redis-") as folder:  # a socket's path must be short
        place, port, log = Path(folder, "socket"), _free_port(), Path(folder, "log")
        process = _start(place, port, log)
        try:
            found = {"TCP": redis.Redis("127.0.0.1", port), "Unix socket": redis.Redis(unix_socket_path=str(place))}
            with contextlib.ExitStack() as stack:
                for client in found.values():
                    stack.callback(client.close)
                    _wait(client, process, log, redis.ConnectionError)
                yield found
        finally:
            process.kill()  # it has nothing to save
            process.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(place: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    # Where the system has it, the server is killed with this process too.
    dies_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    options = {
        "bind": "127.0.0.1", "port": port, "unixsocket": place, "dir": place.parent, "save": "", "appendonly": "no",
        "daemonize": "no", "loglevel": "warning",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as said:
        return subprocess.Popen([*dies_with_us, "redis-server", *words], stdout=said, stderr=said)


def _wait(client: Any, process: subprocess.Popen[bytes], log: Path, not_yet: type[Exception]) -> None:
    """Until the server answers; an error with what it said where it does not."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            client.ping()
            return
        except not_yet:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"redis-server does not answer: {log.read_text(errors='replace')[-2000:]}") from None
            time.sleep(0.01)
