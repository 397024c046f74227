"""Templates: fitting, what is derived from them, files."""

import json
import random

import pytest
import torch

from sic_kernels import ArgumentError
from sic_kernels.delta import Templates, fit_templates
from sic_kernels.delta.fit import as_integers, assign, starting_points, updated
from sic_kernels.delta.reference_encode import dot_templates
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn


def clusters(gen, N, H, D, count, noise=0.05):
    """Rows around `count` far points of each head: rows [N,H,D], points [H,count,D]."""
    points = 3 * randn(gen, H, count, D)
    ids = torch.randint(count, (N, H), generator=gen)
    return points[torch.arange(H), ids] + noise * randn(gen, N, H, D), points


GOLDEN_CENTRES = [
    [[80.0, 16.0, 53.0, 69.8125], [4.07099723815918e-05, 37.0, 74.0, 10.0]],
    [[40.0, 77.0, 13.0, 50.0], [19.0, 56.0, 93.0, 29.0]],
]
GOLDEN_FINGERPRINT = "7f97d3daac6627ccf82f76950b50a9c2"

# --- fitting --------------------------------------------------------------------------------------------------------


def test_clusters_are_found():
    gen = generator(0)
    x, points = clusters(gen, 2000, 3, 32, 8)
    fitted = fit_templates(x, count=24)
    distance = torch.cdist(points, fitted.centres.float()).amin(-1)
    assert float(distance.amax()) < 0.2
    assert (fitted.spread < 32 * 0.05**2).all()
    exact = fit_templates(x, count=1)
    assert_close(exact.centres[:, 0].float(), x.mean(0), atol=2e-3)
    assert_close(exact.spread, ((x - x.mean(0)) ** 2).sum(-1).mean(0) * (2000 / 1999) ** 2, atol=1e-2)


def test_fitting_has_the_same_bits_for_any_number_of_threads():
    x = randn(generator(1), 700, 2, 48, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made.append(fit_templates(x, count=32, seed=7))
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1] == made[2]
    assert_same_bits(made[0].centres, made[1].centres)
    assert fit_templates(x, count=32, seed=8) != made[0]


def test_golden_fingerprint():
    """Fixed forever: the same samples and seed give these bits on every machine."""
    x = (torch.arange(6 * 2 * 4) * 37 % 101).reshape(6, 2, 4).double()
    fitted = fit_templates(x, count=2, seed=3)
    assert fitted.centres.tolist() == GOLDEN_CENTRES
    assert fitted.fingerprint == GOLDEN_FINGERPRINT


def test_sums_are_exact():
    """Integers of 20 bits: dot products are the same in any order, and equal those of Python's integers."""
    x = randn(generator(2), 50, 1, 8) * torch.logspace(-3, 3, 8)
    whole, mean, step = as_integers(x)
    assert torch.equal(whole, whole.round())
    assert float(whole.abs().max()) <= 2**20
    assert_close((whole * step[:, None, None] + mean[:, None]).transpose(0, 1), x.double(), atol=float(step.max()) / 2)
    centres = whole[:, :5]
    nearest, distance = assign(whole, centres)
    for n in range(50):
        row = [int(v) for v in whole[0, n]]
        squares = [sum((a - int(b)) ** 2 for a, b in zip(row, centre)) for centre in centres[0]]
        assert (int(nearest[0, n]), int(distance[0, n])) == (squares.index(min(squares)), min(squares))


def test_an_empty_template_moves_to_the_furthest_sample():
    x = torch.tensor([[[0.0], [1.0], [2.0], [50.0], [90.0]]], dtype=torch.float64)
    centres = torch.tensor([[[1.0], [500.0], [600.0]]], dtype=torch.float64)
    new = updated(x, centres, *assign(x, centres))
    assert new.flatten().tolist() == [29.0, 90.0, 50.0]  # the mean is 28.6


def test_starting_points_are_samples_apart():
    x, _ = clusters(generator(3), 300, 2, 16, 6, noise=0.0)
    whole, _, _ = as_integers(x)
    points = starting_points(whole, 6, generator(0))
    for h in range(2):
        assert len({tuple(p) for p in points[h].tolist()}) == 6  # no point twice while there are others


@pytest.mark.parametrize("value", [0.0, 0.01, -65504.0, 1e-7])
def test_constant_samples(value):
    """One distinct row: every template is it, nothing is left."""
    fitted = fit_templates(torch.full((20, 2, 16), value), count=4)
    assert (fitted.centres == torch.tensor(value).half()).all()
    assert fitted.spread.tolist() == [0, 0]


def test_golden_spread():
    """Samples 0, 2 and 10 of two templates: left out of their means, 0 and 2 are 2 off, and 10 is 9 from its second, 1."""
    fitted = fit_templates(torch.tensor([0.0, 2.0, 10.0])[:, None, None], count=2)
    assert sorted(fitted.centres.flatten().tolist()) == [1.0, 10.0]
    assert_close(fitted.spread, torch.tensor([(4 + 4 + 81) / 3]), atol=1e-3)


def test_spread_is_that_of_rows_not_seen():
    """Few samples a template fit too well; the spread is nevertheless that of others within a tenth."""
    x = randn(generator(8), 6000, 1, 16)
    fitted = fit_templates(x[:1500], count=100)
    fresh = torch.cdist(x[1500:, 0], fitted.centres[0].float()).amin(-1).pow(2).mean()
    seen = torch.cdist(x[:1500, 0], fitted.centres[0].float()).amin(-1).pow(2).mean()
    assert seen < 0.9 * fresh
    assert_close(fitted.spread, fresh[None], atol=0, rtol=0.1)


def test_large_values_stay_finite():
    x = randn(generator(5), 64, 1, 8) * 1e6
    assert bool(fit_templates(x, count=4).centres.isfinite().all())


@pytest.mark.parametrize(
    "samples, given, arg",
    [
        (torch.zeros(3, 4), {}, "samples"), (torch.zeros(70, 1, 4, dtype=torch.int32), {}, "samples"),
        (torch.zeros(0, 1, 4), {}, "samples"), (torch.full((70, 1, 4), torch.nan), {}, "samples"), ("text", {}, "samples"),
        (torch.zeros(70, 1, 1025), {}, "samples"), (torch.zeros(70, 1, 4), {"count": 71}, "count"),
        (torch.zeros(700, 1, 4), {"count": 257}, "count"), (torch.zeros(70, 1, 4), {"count": 0}, "count"),
        (torch.zeros(70, 1, 4), {"count": 1.5}, "count"), (torch.zeros(70, 1, 4), {"seed": -1}, "seed"),
        (torch.zeros(70, 1, 4), {"iterations": -1}, "iterations"),
    ],
)  # fmt: skip
def test_wrong_samples(samples, given, arg):
    with pytest.raises(ArgumentError, match=f"^fit_templates: {arg}: got"):
        fit_templates(samples, **given)


# --- derived --------------------------------------------------------------------------------------------------------


def test_golden_derived():
    """Centres 1 and 5 (mean 3): moved by 2, one step is 2/127, half the squared norm 2; the search is padded."""
    t = Templates(torch.tensor([[[1.0], [5.0]]], dtype=torch.float16), torch.zeros(1))
    assert t.mean.tolist() == [[3.0]]
    assert t.step.tolist() == [float(torch.tensor(2.0) / torch.tensor(127.0))]
    assert t.search.shape == (1, 1, 1, 16, 4)
    assert t.search[0, 0, 0, :3].tolist() == [[-127, 0, 0, 0], [127, 0, 0, 0], [0, 0, 0, 0]]
    assert t.half_norm[0].tolist() == [2.0, 2.0] + [torch.inf] * 14


@pytest.mark.parametrize("n, D", [(1, 1), (7, 33), (16, 64), (17, 80), (256, 6)])
def test_derived(n, D):
    centres = (randn(generator(n), 2, n, D) + 5).half()
    t = Templates(centres, torch.ones(2))
    assert (t.heads, t.count, t.dim) == (2, n, D)
    assert t.nbytes() == 2 * n * D * 2 + 8
    moved = centres.float() - t.mean[:, None]
    q = torch.randint(-127, 128, (5, 2, D), generator=generator(0)).float()
    dots = dot_templates(q, t.search)
    assert dots.shape == (5, 2, -(-n // 16) * 16)
    levels = (moved / t.step.clamp(min=1e-30)[:, None, None]).round()
    assert_close(dots[..., :n], torch.einsum("nhd,hcd->nhc", q, levels), atol=0)
    assert_close(t.half_norm[:, :n], (moved.double() ** 2).sum(-1).float() / 2, atol=0, rtol=1e-6)
    assert t.half_norm[:, n:].isinf().all()


@pytest.mark.parametrize(
    "centres, spread, arg",
    [
        (torch.zeros(1, 2, 3), torch.zeros(1), "centres"),
        (torch.zeros(2, 3).half(), torch.zeros(1), "centres"),
        (torch.zeros(1, 257, 3).half(), torch.zeros(1), "centres"),
        (torch.zeros(1, 2, 1025).half(), torch.zeros(1), "centres"),
        (torch.full((1, 2, 3), torch.inf).half(), torch.zeros(1), "centres"),
        (torch.zeros(1, 2, 3).half(), torch.zeros(2), "spread"),
        (torch.zeros(1, 2, 3).half(), torch.tensor([-1.0]), "spread"),
        (torch.zeros(1, 2, 3).half(), torch.tensor([torch.nan]), "spread"),
        (None, torch.zeros(1), "centres"),
    ],
)
def test_wrong_templates(centres, spread, arg):
    with pytest.raises(ArgumentError, match=f"^Templates: {arg}: got"):
        Templates(centres, spread)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    fitted = fit_templates(randn(generator(6), 100, 2, 12), count=5, meta={"model": "m", "layer": 3})
    path = tmp_path / "templates.safetensors"
    fitted.save(path)
    return fitted, path


def test_load_gives_what_was_saved(saved):
    fitted, path = saved
    loaded = Templates.load(path)
    assert loaded == fitted
    assert hash(loaded) == hash(fitted)
    assert loaded.meta == {"model": "m", "layer": "3"}
    for name in ("centres", "spread", "search", "half_norm", "mean", "step"):
        assert_same_bits(getattr(loaded, name), getattr(fitted, name))


def test_everything_is_part_of_the_fingerprint(saved):
    fitted, _ = saved
    others = [
        Templates(fitted.centres + 1, fitted.spread, fitted.meta),
        Templates(fitted.centres, fitted.spread * 2, fitted.meta),
        Templates(fitted.centres, fitted.spread, {"model": "other"}),
    ]
    assert len({t.fingerprint for t in (fitted, *others)}) == 4


def test_cut_files_are_errors(saved, tmp_path):
    data = saved[1].read_bytes()
    cut = tmp_path / "cut"
    for n in range(0, len(data), 7):
        cut.write_bytes(data[:n])
        with pytest.raises(ArgumentError, match=r"^Templates\.load: path: got"):
            Templates.load(cut)


def test_changed_bytes_are_errors(saved, tmp_path):
    """A flipped bit anywhere is an error, or (in what the format does not mean) changes nothing."""
    fitted, path = saved
    data, bad, rng = path.read_bytes(), tmp_path / "bad", random.Random(0)
    refused = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(changed)
        try:
            assert Templates.load(bad) == fitted
        except ArgumentError:
            refused += 1
    assert refused > 0.9 * len(data)


def test_other_files_are_errors(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other"
    with pytest.raises(ArgumentError, match=r"Templates\.load: path"):
        Templates.load(path)
    save_file({"centres": torch.zeros(1, 1, 1)}, str(path))
    with pytest.raises(ArgumentError, match=r"Templates\.load: path"):
        Templates.load(path)
    good = {"kind": "sic_kernels.delta.Templates", "version": "1", "fingerprint": "x", "meta": json.dumps({})}
    centres, spread = torch.zeros(1, 1, 1, dtype=torch.float16), torch.zeros(1)
    for tensors, about in (
        ({"centres": centres, "spread": spread}, good),
        ({"centres": centres}, good),
        ({"centres": centres, "spread": spread, "more": spread.clone()}, good),
        ({"centres": centres, "spread": spread.double()}, good),
        ({"centres": centres, "spread": spread}, {**good, "version": "2"}),
        ({"centres": centres, "spread": spread}, {**good, "meta": "[1"}),
        ({"centres": centres, "spread": spread}, {**good, "meta": "[1]"}),
    ):
        save_file(tensors, str(path), metadata=about)
        with pytest.raises(ArgumentError, match=r"^Templates\.load: path"):
            Templates.load(path)
