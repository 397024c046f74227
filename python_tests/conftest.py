"""Settings of the whole suite, and the backends that tests need.

A test needs the backend that its parameter `backend` names, and those of `@pytest.mark.backend(name)`. Where one cannot be
used the test is skipped with the reason; if SIC_REQUIRE names it (`SIC_REQUIRE=cuda,triton`) the test fails instead, so that
a machine that must have a GPU cannot pass by skipping. `cpu` and `ref` are always required.
"""

import collections
import os

# Idle OpenMP threads sleep instead of spinning between small tensors, on cores that other tests need. Before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import slicing_helpers

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    import without_hypothesis

    without_hypothesis.install()
else:
    # Reproducible: the same examples in every run; no deadline, since a cold cache is not a failure.
    settings.register_profile(
        "sic", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("sic")

REQUIRED = {"cpu", "ref", *filter(None, os.environ.get("SIC_REQUIRE", "").split(","))}

SIMT_SHARE = int(os.environ.get("SIMT_SHARE", "1"))

# The shared cases run on a GPU too where one is required. Before any test file is imported.
for name in ("cuda", "triton"):
    for backends in (slicing_helpers.NATIVE, slicing_helpers.EVERY):
        if name in REQUIRED and name not in backends:
            backends.append(name)


def backends_of(item):
    """The backends that a test needs."""
    named = [name for mark in item.iter_markers("backend") for name in mark.args]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [*named, *([parameters["backend"]] if isinstance(parameters.get("backend"), str) else [])]


def pytest_configure(config):
    from sic_kernels.runtime.backends import TABLE

    if REQUIRED - set(TABLE):
        raise pytest.UsageError(
            f"SIC_REQUIRE: no backend {', '.join(REQUIRED - set(TABLE))}; there are {', '.join(TABLE)}"
        )


def pytest_report_header():
    return f"emulator: one in {SIMT_SHARE} of each test's cases (SIMT_SHARE)" if SIMT_SHARE > 1 else None


def left_out(items, share):
    """All but one in `share` of each test's cases on the emulator, the first always being run."""
    seen, out = collections.Counter(), []
    for item in items:
        if "simt" in backends_of(item):
            test = item.nodeid.partition("[")[0]
            if seen[test] % share:
                out.append(item)
            seen[test] += 1
    return out


def pytest_collection_modifyitems(config, items):
    if out := left_out(items, SIMT_SHARE):
        config.hook.pytest_deselected(items=out)
        dropped = set(out)
        items[:] = [item for item in items if item not in dropped]


def pytest_runtest_setup(item):
    from sic_kernels.runtime.backends import TABLE, why_not

    for name in backends_of(item):
        reason = why_not(name) if name in TABLE else None
        if reason is not None and name in REQUIRED:
            pytest.fail(f"backend {name} is required: {reason}", pytrace=False)
        if reason is not None:
            pytest.skip(f"backend {name}: {reason}")


@pytest.fixture(autouse=True)
def one_torch_thread_on_the_emulator(request):
    """The emulator runs on the calling thread; torch's idle ones would spin beside it."""
    if "simt" not in backends_of(request.node):
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: a thread pool only costs, and beside other busy processes it costs a hundredfold."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def keep_threads():
    """For commands that set the number of torch's threads."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model and its tokenizer as files."""
    import tiny_model

    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(one_thread):
    """A small random Llama as transformers runs it."""
    from tiny_llama import random_llama

    return random_llama()


@pytest.fixture(scope="module")
def model(one_thread):
    """The same with sliced attention."""
    from tiny_llama import random_llama

    from sic_kernels.integrations.transformers import enable

    return enable(random_llama())


@pytest.fixture
def want():
    """What an uninterrupted run of the small plan of the replay tests leaves behind."""
    import replay_helpers

    p = replay_helpers.plan()
    assert p.run(replay_helpers.inputs(), **replay_helpers.RUN).done
    return replay_helpers.state(p)


@pytest.fixture
def from_zero(caplog):
    """Metrics that count from 0, and every message of the library."""
    from sic_kernels.runtime import metrics

    metrics.reset()
    caplog.set_level("INFO", logger="sic_kernels")
    yield
    metrics.reset()


@pytest.fixture
def simt():
    """The emulator without checks of device values: they would wait for the device, which no capture allows."""
    from sic_kernels.runtime import native

    module = native.simt_module()
    module.set_device_checks(False)
    yield module
    module.set_device_checks(True)
    module.set_schedule("forward")


@pytest.fixture
def kernels(simt):
    """How many kernels each segment of `graph_helpers` launches; what is drawn is one."""
    import graph_helpers as h

    from sic_kernels import replay

    step = replay.Step(h.plan("cpu").tensors, 0, 1)
    step.count = h.CHUNK
    called = [h.launches(simt, lambda fn=fn: fn(step))[0] for fn in (h.append, h.attend, h.keep)]
    return [1, 1, *called]
