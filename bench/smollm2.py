"""The model of the benchmarks that run one, loaded once, and its text."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def model():
    models = pytest.importorskip("sic_kernels.models")
    try:
        return models.load()
    except models.MissingExtra as error:
        pytest.skip(str(error))


def prompt(count):
    from sic_kernels import models

    return model().tokens(models.text("hamlet"), count)[0]
