"""One tree of errors, one format."""

import pickle

import pytest

import sic_kernels as sic


def test_tree():
    for error in (sic.ArgumentError, sic.BackendError, sic.ConfigError):
        assert issubclass(error, sic.SicError)
    assert issubclass(sic.ArgumentError, ValueError)
    assert not issubclass(sic.BackendError, ValueError)


def test_format():
    error = sic.ArgumentError.of(
        "sliced_attention", "k_cache", "float64[8,3,16,64]", "float32|float16|bfloat16 of rank 4"
    )
    assert str(error) == (
        "sliced_attention: k_cache: got float64[8,3,16,64], expected float32|float16|bfloat16 of rank 4"
    )
    with pytest.raises(ValueError):
        raise error
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_public_names_resolve_and_others_do_not():
    assert sic.__version__
    assert "slicing" in dir(sic)
    with pytest.raises(AttributeError, match="has no attribute 'slycing'"):
        _ = sic.slycing
