"""One tree of errors, one format."""

import pickle
import sys

import pytest

import sic_kernels as sic
from sic_kernels.runtime import native


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


@pytest.mark.parametrize("text", ["x = 1", "raise ValueError('half a module')", "raise OSError('unreadable')"])
def test_a_damaged_native_module_is_a_backend_error(text, tmp_path, monkeypatch):
    """Of another version, or one that raises anything as it is imported: the error says how to build it."""
    (tmp_path / "_simt.py").write_text(text)
    monkeypatch.setattr(sic, "__path__", [str(tmp_path), *sic.__path__])
    monkeypatch.delitem(sys.modules, "sic_kernels._simt", raising=False)
    with pytest.raises(sic.BackendError, match=r"^sic_kernels\._simt cannot be imported \(.+\); build it with: "):
        native.simt_module.__wrapped__()
    sys.modules.pop("sic_kernels._simt", None)
