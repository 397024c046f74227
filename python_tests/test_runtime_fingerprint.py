"""Fingerprints: a golden digest, every field counts and is named, what was written is read again and nothing else."""

import dataclasses
import json
import subprocess
import sys

import pytest

import sic_kernels as sic
from sic_kernels.replay import Fingerprint, context_bucket

SAVED = Fingerprint("smollm2", "main", "bfloat16", "k4v4", 2048, "0123456789abcdef")
OTHER = {
    "model": "smollm3", "revision": "v2", "dtype": "float16", "quantisation": "none", "context_bucket": 4096,
    "config": "fedcba9876543210",
}  # fmt: skip


def test_digest():
    """blake2b of 16 bytes over this text, worked with b2sum -l 128."""
    text = (
        '{"config":"0123456789abcdef","context_bucket":2048,"dtype":"bfloat16","model":"smollm2",'
        '"quantisation":"k4v4","revision":"main"}'
    )
    assert json.loads(text) == dataclasses.asdict(SAVED)
    assert SAVED.digest == bytes.fromhex("fb6d28e5f17bc5bf3becb305d89f254e")
    assert len(SAVED.digest) == 16


def test_the_digest_is_the_same_in_another_process():
    code = (
        "from sic_kernels.runtime.fingerprint import Fingerprint\n"
        "print(Fingerprint('smollm2', 'main', 'bfloat16', 'k4v4', 2048, '0123456789abcdef').digest.hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == SAVED.digest.hex()


def test_no_field_is_forgotten_here():
    assert set(OTHER) == {f.name for f in dataclasses.fields(Fingerprint)}


@pytest.mark.parametrize("field", OTHER)
def test_one_field_differs_and_is_named(field):
    live = dataclasses.replace(SAVED, **{field: OTHER[field]})
    assert SAVED.diff(live) == {field: (getattr(SAVED, field), OTHER[field])}
    assert live.diff(SAVED) == {field: (OTHER[field], getattr(SAVED, field))}
    assert live != SAVED
    assert SAVED.digest != live.digest


def test_all_fields_differ_in_their_order():
    assert list(SAVED.diff(Fingerprint(**OTHER))) == [f.name for f in dataclasses.fields(Fingerprint)]


def test_the_same_is_interchangeable():
    again = Fingerprint(**dataclasses.asdict(SAVED))
    assert SAVED.diff(again) == {}
    assert SAVED.digest == again.digest


def test_settings_are_part_of_it():
    assert Fingerprint("m").config == sic.config.digest


def test_neighbouring_fields_are_not_run_together():
    assert Fingerprint("ab", "c", config="").digest != Fingerprint("a", "bc", config="").digest


def test_json_round_trip():
    for saved in (SAVED, dataclasses.replace(SAVED, model='a "name" 模型\n')):
        again = Fingerprint.from_json(saved.to_json())
        assert again == saved
        assert again.digest == saved.digest


GOOD = dataclasses.asdict(SAVED)
WRONG = [
    {}, {"model": "smollm2"}, {k: v for k, v in GOOD.items() if k != "config"}, GOOD | {"extra": 1}, GOOD | {"model": 3},
    GOOD | {"context_bucket": "2048"}, GOOD | {"context_bucket": True}, GOOD | {"config": None},
]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "{", "null", "3", '"text"', '["smollm2"]', "[" * 100_000, *map(json.dumps, WRONG)], ids=range(15)
)
def test_anything_else_is_refused(text):
    """Also an object that lacks a field: the value of this process must not take its place."""
    with pytest.raises(sic.ArgumentError, match=r"^Fingerprint: "):
        Fingerprint.from_json(text)


@pytest.mark.parametrize("field", OTHER)
def test_wrong_types_are_refused_by_name(field):
    with pytest.raises(sic.ArgumentError, match=f"^Fingerprint: {field}: got float, expected (str|int)"):
        dataclasses.replace(SAVED, **{field: 1.5})


@pytest.mark.parametrize(
    "tokens, bucket",
    [(0, 512), (512, 512), (513, 1024), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)],
)
def test_bucket(tokens, bucket):
    assert context_bucket(tokens) == bucket


@pytest.mark.parametrize("tokens", [-1, (1 << 20) + 1, 1.5, True, "512"])
def test_bucket_refuses(tokens):
    with pytest.raises(sic.ArgumentError, match=r"context_bucket: tokens: got .*, expected 0 to 1048576"):
        context_bucket(tokens)
