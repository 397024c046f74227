"""The metrics over HTTP, for Prometheus to scrape. HTTP, its formats and its threads are prometheus_client's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from .errors import ArgumentError
from .extras import extra
from .metrics import REGISTRY, Registry
from .values import instance


def _client(part: str = "") -> Any:
    return extra(f"prometheus_client{part}", "metrics over HTTP", "prometheus")


class Collector:
    """A registry as prometheus_client reads it: its `REGISTRY.register(Collector())` adds it to a server that runs already."""

    def __init__(self, registry: Registry = REGISTRY) -> None:
        instance("Collector", "registry", registry, Registry)
        self._core, self._registry = _client(".core"), registry

    def collect(self) -> Iterator[Any]:
        kinds = {"gauge": self._core.GaugeMetricFamily, "counter": self._core.CounterMetricFamily}
        for family in self._registry.families():
            labels = [] if family.label is None else [family.label]
            made = kinds[family.kind](family.name, family.about, labels=labels)
            for key, value in family.samples.items():
                made.add_metric([key] if labels else [], value)
            yield made


class Exporter:
    """A server of one registry; `metrics.serve` makes it. Also a context manager."""

    def __init__(self, registry: Registry, port: int, addr: str) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise ArgumentError.of("serve", "port", repr(port), "0 to 65535")
        if not isinstance(addr, str) or not addr or not addr.isprintable():
            raise ArgumentError.of("serve", "addr", repr(addr), "an address, or a name of this machine")
        client = _client()
        collected = client.CollectorRegistry()
        collected.register(Collector(registry))
        try:
            self._server, self._thread = client.start_http_server(port, addr, registry=collected)
        except socket.gaierror as error:
            raise ArgumentError.of(
                "serve", "addr", f"{addr[:64]!a} ({error.strerror})", "an address to listen on"
            ) from None
        except OSError as error:
            raise ArgumentError.of(
                "serve", "port", f"{addr}:{port} ({error.strerror})", "an address to listen on"
            ) from None
        except ValueError as error:  # no name of a host at all
            raise ArgumentError.of("serve", "addr", f"{addr[:64]!a} ({error})", "an address to listen on") from None
        self._lock = threading.Lock()
        self._open = True
        self.addr, self.port = addr, int(self._server.server_port)

    @property
    def url(self) -> str:
        host = f"[{self.addr}]" if ":" in self.addr else self.addr
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening and end the thread; a second call does nothing."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
