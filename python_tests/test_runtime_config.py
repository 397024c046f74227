"""SIC_* settings: read once, validated, immutable, part of the fingerprint."""

import dataclasses
import subprocess
import sys

import pytest

import sic_kernels as sic
from sic_kernels.runtime import config


def test_defaults():
    settings = config.load({})
    assert settings.slice_ratio == 0.12
    assert settings.hash_depth == 3
    assert settings.cursor_timeout_ms == 8500
    assert settings.backend == "auto"
    assert settings.cpu_isa == "auto"
    assert settings.num_threads == 0
    assert settings.strict is False
    assert settings.given == ()
    assert settings == config.Config()


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda s: s.name)
def test_table_and_dataclass_agree(setting):
    assert setting.name.startswith("SIC_")
    assert getattr(config.Config(), setting.field) == setting.default
    assert setting.about
    assert setting.expected


def test_every_field_has_a_variable():
    fields = {f.name for f in dataclasses.fields(config.Config)} - {"given"}
    assert fields == {s.field for s in config.SETTINGS}


@pytest.mark.parametrize(
    "name, text, field, value",
    [
        ("SIC_BACKEND", "cuda", "backend", "cuda"),
        ("SIC_BACKEND", " CPU ", "backend", "cpu"),
        ("SIC_CPU_ISA", "avx2", "cpu_isa", "avx2"),
        ("SIC_NUM_THREADS", "auto", "num_threads", 0),
        ("SIC_NUM_THREADS", "7", "num_threads", 7),
        ("SIC_NUM_THREADS", "256", "num_threads", 256),
        ("SIC_STRICT", "1", "strict", True),
        ("SIC_STRICT", "0", "strict", False),
        ("SIC_LOG", "DEBUG", "log_level", "debug"),
        ("SIC_SLICE_RATIO", "0.06", "slice_ratio", 0.06),
        ("SIC_HASH_DEPTH", "1", "hash_depth", 1),
        ("SIC_CURSOR_TIMEOUT_MS", "100", "cursor_timeout_ms", 100),
    ],
)
def test_values(name, text, field, value):
    assert getattr(config.load({name: text}), field) == value


@pytest.mark.parametrize(
    "name, text",
    [
        ("SIC_BACKEND", "gpu"),
        ("SIC_CPU_ISA", "sse"),
        ("SIC_NUM_THREADS", "0"),
        ("SIC_NUM_THREADS", "-1"),
        ("SIC_NUM_THREADS", "2.5"),
        ("SIC_NUM_THREADS", "257"),
        ("SIC_STRICT", ""),
        ("SIC_STRICT", "yes"),
        ("SIC_LOG", "loud"),
        ("SIC_SLICE_RATIO", "0"),
        ("SIC_SLICE_RATIO", "1.01"),
        ("SIC_SLICE_RATIO", "nan"),
        ("SIC_SLICE_RATIO", "12%"),
        ("SIC_HASH_DEPTH", "4"),
        ("SIC_CURSOR_TIMEOUT_MS", "0"),
    ],
)
def test_malformed_value_names_variable_value_and_expectation(name, text):
    with pytest.raises(sic.ConfigError) as error:
        config.load({name: text})
    message = str(error.value)
    assert message.startswith(f"{name}: got {text!r}, expected ")
    assert len(message) > len(f"{name}: got {text!r}, expected ")


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("SIC_BAKEND", "SIC_BACKEND"),
        ("SIC_SLICERATIO", "SIC_SLICE_RATIO"),
        ("SIC_THREADS", "SIC_NUM_THREADS"),
        ("SIC_CURSOR_TIMEOUT", "SIC_CURSOR_TIMEOUT_MS"),
    ],
)
def test_unknown_name_suggests_the_nearest(wrong, right):
    with pytest.raises(sic.ConfigError, match=f"^{wrong}: unknown setting; did you mean {right}\\?"):
        config.load({wrong: "1"})


def test_other_variables_and_build_variables_are_left_alone():
    settings = config.load({"PATH": "/bin", "SICILY": "1", "SIC_CMAKE_ARGS": "-DX=1", "SIC_BUILD_DIR": "b"})
    assert settings.given == ()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Config().slice_ratio = 0.5


def test_digest_covers_what_changes_results_and_nothing_else():
    base = config.Config().digest
    assert len(base) == 16
    assert int(base, 16) >= 0
    other = {
        "SIC_BACKEND": "ref", "SIC_CPU_ISA": "plain", "SIC_STRICT": "1", "SIC_SLICE_RATIO": "0.2",
        "SIC_HASH_DEPTH": "2", "SIC_CURSOR_TIMEOUT_MS": "1",
    }  # fmt: skip
    digests = {config.load({name: text}).digest for name, text in other.items()}
    assert base not in digests
    assert len(digests) == len(other)
    for name, text in {"SIC_NUM_THREADS": "3", "SIC_LOG": "info"}.items():
        assert config.load({name: text}).digest == base


def test_digest_is_the_same_for_an_explicit_default():
    assert config.load({"SIC_SLICE_RATIO": "0.12"}).digest == config.Config().digest


@pytest.mark.parametrize(
    "saved, live, message",
    [
        ({}, {"SIC_STRICT": "1"}, "SIC_STRICT: changed to '1' after it was read as unset"),
        ({"SIC_STRICT": "1"}, {}, "SIC_STRICT: changed to unset after it was read as '1'"),
        ({"SIC_STRICT": "1"}, {"SIC_STRICT": "0"}, "SIC_STRICT: changed to '0' after it was read as '1'"),
        ({}, {"SIC_NEW": "1"}, "SIC_NEW: changed to '1' after it was read as unset"),
    ],
)
def test_verify_reports_a_late_change(saved, live, message):
    settings = config.load(saved)
    settings.verify(saved)
    with pytest.raises(sic.ConfigError, match=f"^{message}"):
        settings.verify(live)


def _python(code: str, **environ: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_process_settings_are_read_once_and_a_late_change_is_an_error_when_asked():
    out = _python(
        "import os, sic_kernels as sic\n"
        "os.environ['SIC_SLICE_RATIO'] = '0.25'  # before the first use: counts\n"
        "assert sic.config.slice_ratio == 0.25\n"
        "os.environ['SIC_SLICE_RATIO'] = '0.5'\n"
        "assert sic.config.slice_ratio == 0.25\n"
        "assert sic.config is sic.config\n"
        "try: sic.config.verify()\n"
        "except sic.ConfigError as e: print(e)\n"
    )
    assert out.startswith("SIC_SLICE_RATIO: changed to '0.5' after it was read as '0.25'")


def test_bad_environment_is_an_error_at_first_use_not_at_import():
    out = _python(
        "import sic_kernels as sic\n"
        "try: sic.config\n"
        "except sic.ConfigError as e: print(e)\n",
        SIC_SLICE_RATO="0.2",
    )  # fmt: skip
    assert "did you mean SIC_SLICE_RATIO?" in out
