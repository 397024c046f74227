"""Logging: silent unless asked, levels, shapes formatted only when shown."""

import logging
import subprocess
import sys

import numpy
import torch

from sic_kernels.runtime import log


def test_describe():
    assert log.describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16[2,3]@cpu"
    assert log.describe(torch.zeros(())) == "float32[]@cpu"
    assert log.describe(numpy.zeros((4,), dtype=numpy.int16)).startswith("int16[4]")
    assert log.describe(None) == "None"
    assert log.describe("x" * 100) == "'" + "x" * 36 + "..."


class Counting:
    dtype = "float32"
    reads = 0

    @property
    def shape(self):
        Counting.reads += 1
        return (7,)


def test_shapes_are_formatted_only_when_shown(caplog):
    logger = log.get_logger("test")
    Counting.reads = 0
    with caplog.at_level(logging.INFO, logger="sic_kernels"):
        logger.debug("op %s", log.shapes(x=Counting()))
        assert Counting.reads == 0
        logger.info("op %s", log.shapes(x=Counting(), y=None))
    assert Counting.reads > 0  # once for each handler
    assert [r.getMessage() for r in caplog.records] == ["op x=float32[7] y=None"]


def _stderr(**environ: str) -> str:
    code = (
        "from sic_kernels.runtime.log import get_logger\n"
        "log = get_logger('slicing')\n"
        "get_logger('slicing')\n"
        "log.debug('fine detail'); log.info('some news'); log.warning('trouble')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_library_is_silent_unless_asked():
    assert _stderr() == ""


def test_sic_log_sends_its_level_and_above_to_stderr_once():
    text = _stderr(SIC_LOG="info")
    assert "fine detail" not in text
    assert text.count("INFO sic_kernels.slicing: some news") == 1
    assert text.count("WARNING sic_kernels.slicing: trouble") == 1
    assert "fine detail" in _stderr(SIC_LOG="debug")
    assert "some news" not in _stderr(SIC_LOG="error")
