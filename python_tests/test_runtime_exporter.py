"""The HTTP exporter says what the text says, closes, and names the remedy when its package is missing."""

import math
import socket
import sys
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, parser
from prometheus_client.exposition import generate_latest

import sic_kernels as sic
from sic_kernels.runtime import exporter
from sic_kernels.runtime.metrics import Registry


@pytest.fixture
def registry():
    registry = Registry()
    registry.register("hits", "Share of hits.", "hits counted", "tries").add(1, 3)
    registry.register("pool", "Nothing measured.", "bytes in use", "bytes", kind="gauge")
    falls = registry.register("falls", 'A "quoted" \\ help\nwith a line.', "falls", "tries", label="reason")
    falls.add(0.5, 2, reason='a "b" \\ c\nd')
    falls.add(1, 2, reason="short")
    return registry


def parsed(text):
    """name -> (type, help, {(labels): value}), NaN as the string "NaN" so that it equals itself."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        samples = {
            (s.name, *sorted(s.labels.items())): "NaN" if math.isnan(s.value) else s.value for s in family.samples
        }
        found[family.name] = (family.type, family.documentation, samples)
    return found


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_collector_and_text_are_one(registry):
    collected = CollectorRegistry()
    collected.register(exporter.Collector(registry))
    theirs, ours = parsed(generate_latest(collected).decode()), parsed(registry.prometheus_text())
    assert theirs == ours
    assert ours["hits"] == ("gauge", "Share of hits.", {("hits",): 1 / 3})
    assert ours["pool"][2] == {("pool",): "NaN"}
    assert ours["falls"][2][("falls", ("reason", 'a "b" \\ c\nd'))] == 0.125
    assert ours["falls_numerator"][:2] == ("counter", "falls")


def test_serving(registry):
    threads = threading.active_count()
    with exporter.Exporter(registry, 0, "127.0.0.1") as served:
        assert parsed(fetch(served.url)) == parsed(registry.prometheus_text())
        registry.get("hits").add(2, 3)
        assert parsed(fetch(served.url))["hits"][2] == {("hits",): 0.5}
        port = served.port
    served.close()  # again: nothing happens
    with pytest.raises(OSError):
        fetch(served.url)
    assert threading.active_count() == threads
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_the_library_serves_its_own_registry():
    served = sic.metrics.serve(0)
    try:
        assert served.url == f"http://127.0.0.1:{served.port}/metrics"
        assert parsed(fetch(served.url)).keys() == parsed(sic.metrics.prometheus_text()).keys()
    finally:
        served.close()


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(sic.ArgumentError, match=rf"serve: port: got 127.0.0.1:{port} \(Address already in use\)"):
            sic.metrics.serve(port)


@pytest.mark.parametrize("port", [-1, 65536, 9400.0, "9400", True])
def test_wrong_ports(port):
    with pytest.raises(sic.ArgumentError, match=r"serve: port: got .*, expected 0 to 65535"):
        sic.metrics.serve(port)


@pytest.mark.parametrize("addr", [5, None, "", b"127.0.0.1", "\ud800", "a" * 1000, "127.0.0.1\0"], ids=range(7))
def test_wrong_addresses(addr):
    with pytest.raises(sic.ArgumentError, match=r"serve: addr: got ") as error:
        sic.metrics.serve(0, addr)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300


def test_an_address_with_colons_is_bracketed(registry):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with exporter.Exporter(registry, 0, "::1") as served:
        assert served.url == f"http://[::1]:{served.port}/metrics"
        assert parsed(fetch(served.url)) == parsed(registry.prometheus_text())


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        sic.SicError, match=r"need the package prometheus-client: pip install 'sic_kernels\[prometheus\]'"
    ):
        sic.metrics.serve(0)
