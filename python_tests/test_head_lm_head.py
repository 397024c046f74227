"""lm_head_stats and probe: the acceptance grid, rounding against a plain implementation, mixed types, determinism."""

import math

import pytest
import torch
from head_helpers import by_case, check_case, every_backend, native_backend, run, stats_of, thinned

from sic_kernels import head
from sic_kernels.head import cases
from sic_kernels.testing import assert_close, assert_same_bits, generator, randn

GRID = list(cases.lm_head_grid())


@every_backend
def test_golden(backend):
    """Two rows of two channels, three ids: logits (1, 2, 3) and (0, -1, -1)."""
    hidden = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    weight = torch.tensor([[0.5, 0.5], [0.5, 1.5], [1.0, 2.0]])
    got = stats_of(backend, "lm_head_stats", cases.lm_head_inputs(hidden, weight, k=2))
    assert got.argmax.tolist() == [2, 0]
    assert got.topk_ids.tolist() == [[2, 1], [0, 1]]
    total = math.e + math.e**2 + math.e**3
    assert got.lse.tolist() == pytest.approx([math.log(total), math.log(1 + 2 / math.e)])
    assert got.topk_logprobs[0].tolist() == pytest.approx([3 - math.log(total), 2 - math.log(total)])
    assert got.score.shape == (2, 0)


@pytest.mark.parametrize("backend, case", [(b, c) for b in ("cpu", "simt") for c in thinned(GRID, b, 2)], ids=str)
def test_grid(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape, options",
    [((256, 512, 128), {"softcap": 20.0}), ((255, 507, 123), {"temperature": 1.5}), ((193, 70, 517), {"bias": True})],
    ids=str,
)
def test_whole_shapes(shape, options, dtype):
    """More rows than a task or a tile has, on the CPU; the emulator has them with fewer rows in the grid."""
    check_case(cases.lm_head_case(*shape, dtype, **options), "cpu")


@pytest.mark.parametrize(
    "D, V, dtype",
    [
        (3584, 152064, torch.bfloat16), (4096, 102400, torch.float16), (896, 151936, torch.float32),
        (2048, 32256, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_large_vocabularies(D, V, dtype):
    """Rows of the largest shapes. Rows of weights overlap in memory, each a step further, so that they need not all be made;
    their logits are then a correlation, which a Fourier transform gives in float64."""
    gen, step = generator(D), 7
    band, hidden = (randn(gen, V * step + D) * (3 / D**0.5)).to(dtype), randn(gen, 3, D).to(dtype)
    spectrum = torch.fft.rfft(band.double()) * torch.fft.rfft(hidden.double(), len(band)).conj()
    logits = torch.fft.irfft(spectrum, len(band))[:, : V * step : step]
    got = run("lm_head_stats", cases.lm_head_inputs(hidden, band.as_strided((V, D), (step, 1)), k=4), "cpu")
    want = run("logits_stats", cases.logits_inputs(logits, k=4), "ref")
    cases.lm_head_case(3, D, V, dtype).compare(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D, V", [(576, 4096), (507, 123), (2048, 32256)])
def test_no_worse_than_a_plain_implementation(D, V, dtype):
    """The error of lse against float64 is at most that of torch in f32, plus 1e-5."""
    gen = generator(2)
    hidden, weight = randn(gen, 16, D).to(dtype), (randn(gen, V, D) * (3 / D**0.5)).to(dtype)
    truth = (hidden.double() @ weight.double().T).logsumexp(1)
    plain = (hidden.float() @ weight.float().T).logsumexp(1)
    ours = head.lm_head_stats(hidden, weight).lse
    assert ((ours - truth).abs() <= (plain - truth).abs() + 1e-5).all()


@native_backend
@pytest.mark.parametrize("hidden_type", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_type", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types_may_differ(backend, hidden_type, weight_type):
    gen = generator(5)
    hidden, weight = randn(gen, 3, 90).to(hidden_type), (randn(gen, 77, 90) / 4).to(weight_type)
    check_case(cases.lm_head_case(3, 90, 77, hidden_type), backend, cases.lm_head_inputs(hidden, weight, k=3))


@native_backend
def test_a_row_does_not_depend_on_its_batch(backend):
    """Nor on the strides of the hidden states."""
    gen = generator(7)
    D, V, B = 200, 1100, 70 if backend == "cpu" else 19
    for dtype in (torch.bfloat16, torch.float32):
        hidden, weight = randn(gen, B, D + 8).to(dtype)[:, :D], (randn(gen, V, D + 3) / 8).to(dtype)[:, :D]
        whole = run("lm_head_stats", cases.lm_head_inputs(hidden, weight, k=4), backend)
        for rows in (slice(0, 1), slice(5, 8), slice(B - 3, B)):
            part = run("lm_head_stats", cases.lm_head_inputs(hidden[rows].clone(), weight, k=4), backend)
            for got, want in zip(part, whole):
                assert_same_bits(got, want[rows] if len(want) else want)


@native_backend
def test_faults_of_hidden_states(backend):
    """A NaN in one row of hidden states is that row's alone; a weight that is infinite is everybody's."""
    gen = generator(8)
    hidden, weight = randn(gen, 6, 40), randn(gen, 100, 40)
    clean = stats_of(backend, "lm_head_stats", cases.lm_head_inputs(hidden, weight, k=1))
    broken = hidden.clone()
    broken[2, 7] = math.nan
    got = stats_of(backend, "lm_head_stats", cases.lm_head_inputs(broken, weight, k=1))
    assert got.status.tolist() == [0, 0, head.Status.NAN, 0, 0, 0]
    others = [0, 1, 3, 4, 5]
    assert_same_bits(got.entropy[others], clean.entropy[others])
    weight[3, 0] = math.inf
    got = stats_of(backend, "lm_head_stats", cases.lm_head_inputs(hidden.abs(), weight, k=1))
    assert got.status.tolist() == [head.Status.INF] * 6


@native_backend
def test_of_equals_the_lowest_id(backend):
    """Few different logits, exact ones, over many tasks and tiles."""
    gen = generator(10)
    hidden, weight = (
        torch.randint(-2, 3, (n, 8), generator=gen).float() for n in (3, 5003 if backend == "cpu" else 700)
    )
    inputs = cases.lm_head_inputs(hidden, weight, k=64)
    want, got = run("lm_head_stats", inputs, "ref"), run("lm_head_stats", inputs, backend)
    assert got[4].tolist() == want[4].tolist()
    assert got[3].tolist() == want[3].tolist()


# --- probes ---------------------------------------------------------------------------------------------------------


@every_backend
def test_golden_probe(backend):
    """inner = (3, -1); sums 3 - 2 * -1 + 0.5 and, with relu, 3 + 0.5."""
    hidden = torch.tensor([[1.0, 2.0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -2.0]]), torch.tensor([0.5])
    assert run("probe", (hidden, *weights, 0, 1), backend)[0].item() == pytest.approx(5.5)
    assert run("probe", (hidden, *weights, 1, 1), backend)[0].item() == pytest.approx(3.5)
    want = 1 / (1 + math.exp(-5.5))
    assert run("probe", (hidden, *weights, 0, 0), backend)[0].item() == pytest.approx(want, abs=1e-6)


@native_backend
@by_case(list(cases.probe_grid()))
def test_probe_grid(case, backend):
    check_case(case, backend)


@native_backend
def test_a_probe_comes_along(backend):
    """The score of lm_head_stats is that of probe, bit for bit."""
    gen = generator(4)
    hidden, weight = randn(gen, 9, 96).bfloat16(), randn(gen, 64, 96).bfloat16()
    of_probe = (randn(gen, 16, 96).bfloat16(), randn(gen, 2, 16), randn(gen, 2), 1, 0)
    fused = run("lm_head_stats", cases.lm_head_inputs(hidden, weight, of_probe), backend)[9]
    assert_same_bits(fused, run("probe", (hidden, *of_probe), backend)[0])


def test_public_probe():
    """A vector [R] gives [B]; a bias may be a number; lm_head_stats takes a Probe."""
    gen = generator(6)
    hidden, projection, vector = randn(gen, 5, 32), randn(gen, 16, 32), randn(gen, 16)
    score = head.probe(hidden, projection, vector, 0.25)
    assert score.shape == (5,)
    assert_close(score, torch.sigmoid(hidden @ projection.T @ vector + 0.25), atol=1e-5)
    many = head.Probe(projection, vector[None], torch.tensor([0.25]))
    assert_same_bits(head.lm_head_stats(hidden, randn(gen, 50, 32), probe=many).score[:, 0], score)
    assert head.lm_head_stats(hidden, randn(gen, 50, 32)).score is None
