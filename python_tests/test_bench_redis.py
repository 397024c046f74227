"""The Redis server of a benchmark: its own, and gone with it; and what is said where there is none."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "bench" / "redis_peer.py"
spec = importlib.util.spec_from_file_location("redis_peer", FILE)
redis_peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(redis_peer)

needs_redis = pytest.mark.skipif(redis_peer.why_not() is not None, reason=str(redis_peer.why_not()))


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(redis_peer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(redis_peer.shutil, "which", lambda name: name)
    assert redis_peer.why_not().startswith("the package redis is not installed")
    monkeypatch.setattr(redis_peer.shutil, "which", lambda name: None)
    assert redis_peer.why_not().startswith("redis-server is not installed")


@needs_redis
def test_both_ways_reach_one_server_that_ends_with_the_block():
    with contextlib.suppress(ZeroDivisionError), redis_peer.clients() as clients:
        clients["TCP"].set(b"key\0", b"bytes\xff")
        assert clients["Unix socket"].get(b"key\0") == b"bytes\xff"
        server = Path("/proc", str(clients["TCP"].info("server")["process_id"]))
        assert server.exists()
        assert clients["TCP"].config_get("save") == {"save": ""}
        raise ZeroDivisionError
    assert not server.exists()


@needs_redis
def test_a_server_that_cannot_start(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(redis_peer, "_free_port", lambda: taken.getsockname()[1])
        with pytest.raises(RuntimeError, match=r"does not answer: [^$]*Address already in use"), redis_peer.clients():
            pass


@needs_redis
@pytest.mark.skipif(redis_peer.shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_killed_benchmark_takes_its_server_with_it(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(FILE.parent)!r})
import redis_peer
with redis_peer.clients() as clients:
    print(clients["TCP"].info("server")["process_id"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    status = Path("/proc", done.stdout.strip(), "status")
    assert done.stdout.strip().isdigit(), done.stderr
    for _ in range(500):
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return
        redis_peer.time.sleep(0.01)
    pytest.fail("the server is still there")
