"""Templates of a whole model, how they are found, and reports on what coding costs."""

import copy
import json
import subprocess
import sys
import types

import pytest
import torch

from sic_kernels import delta
from sic_kernels.delta import model_templates
from sic_kernels.delta.model_shape import ModelShape, weights_digest
from sic_kernels.runtime.errors import ArgumentError

LAYERS, HKV, HQ, D, N = 3, 2, 4, 64, 160

safetensors = pytest.importorskip("safetensors.torch", reason="pip install safetensors")


def config(**changes):
    """What a transformers configuration has of our interest."""
    fields = {
        "_name_or_path": "made up", "num_hidden_layers": LAYERS, "num_attention_heads": HQ, "num_key_value_heads": HKV,
        "hidden_size": HQ * D, "vocab_size": 100, "max_position_embeddings": 512, "rope_theta": 10000.0,
    }  # fmt: skip
    return types.SimpleNamespace(**{**fields, **changes})


def samples(seed=0, layers=LAYERS):
    """Keys at positions 0, 1, .., values: rows around a few centres, other ones in each layer."""
    gen = torch.Generator().manual_seed(seed)
    rope, at = delta.Rope(10000.0, D), torch.arange(N)

    def rows(layer):
        centres = torch.randn(6, HKV, D, generator=torch.Generator().manual_seed(100 + layer))
        noise = 0.2 * (1 + layer) * torch.randn(N, HKV, D, generator=gen)
        return centres[torch.randint(6, (N,), generator=gen)] + noise

    return [delta.LayerSamples(rope.apply(rows(layer), at), rows(layer), at) for layer in range(layers)]


@pytest.fixture(scope="module")
def fitted():
    return delta.fit_model_templates(config(), samples(), count=8, iterations=4, meta={"command": "a test"})[0]


# --- fitting and files ------------------------------------------------------------------------------------------------


def test_fitting_is_reproducible_and_reports_what_is_left(fitted):
    again, norms = delta.fit_model_templates(config(), samples(), count=8, iterations=4)
    assert again.keys == fitted.keys
    assert again.values == fitted.values
    assert again.params == fitted.params
    assert 0 < norms.keys[0] < norms.keys[-1] < 1  # noisier layers leave more
    assert 0 < norms.values[0] < norms.values[-1] < 1
    other, _ = delta.fit_model_templates(config(), samples(), count=8, iterations=4, seed=1)
    assert other.keys != fitted.keys


def test_one_entry_a_layer():
    with pytest.raises(ArgumentError, match=r"samples.*2 layers.*3 layers"):
        delta.fit_model_templates(config(), samples(layers=2), count=4)


def test_save_and_load(fitted, tmp_path):
    path = tmp_path / "t.safetensors"
    fitted.save(path)
    loaded = delta.ModelTemplates.load(path)
    for a, b in zip((*loaded.keys, *loaded.values), (*fitted.keys, *fitted.values)):
        assert torch.equal(a.centres, b.centres)
        assert torch.equal(a.spread, b.spread)
    assert loaded.keys == fitted.keys  # fingerprints: what one wrote, the other reads
    assert loaded.params == fitted.params
    assert loaded.shape.fields() == fitted.shape.fields()
    assert loaded.meta == {"command": "a test"}
    assert loaded.nbytes() == fitted.nbytes()
    assert loaded.count == 8


def test_damaged_files_are_refused(fitted, tmp_path):
    path = tmp_path / "t.safetensors"
    fitted.save(path)
    good = path.read_bytes()
    for cut in (0, 7, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(ArgumentError, match=r"ModelTemplates.load: path"):
            delta.ModelTemplates.load(path)
    for at in range(0, len(good), 397):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(ArgumentError, match=r"ModelTemplates.load: path"):
            delta.ModelTemplates.load(path)
    with pytest.raises(ArgumentError, match=r"ModelTemplates.load: path"):
        delta.ModelTemplates.load(tmp_path / "nothing")


def altered(fitted, tmp_path, change):
    """A file whose tensors and metadata went through `change`, with the digest that fits."""
    tensors = fitted._tensors()
    about = {"kind": model_templates.KIND, "version": model_templates.VERSION, "weights": "", "meta": "{}",
             "shape": json.dumps(fitted.shape.fields())}  # fmt: skip
    change(tensors, about)
    about.setdefault("digest", model_templates._digest(tensors, about))
    path = tmp_path / "altered.safetensors"
    safetensors.save_file(tensors, path, metadata=about)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda t, a: a.update(kind="something else"),
        lambda t, a: a.update(version="2"),
        lambda t, a: a.update(digest="0" * 32),
        lambda t, a: a.update(shape="{}"),
        lambda t, a: a.update(shape="not JSON"),
        lambda t, a: a.update(shape="[1, 2]"),
        lambda t, a: a.update(meta="7"),
        lambda t, a: t.pop("v_spread"),
        lambda t, a: t.update(more=torch.zeros(1)),
        lambda t, a: t.update(k_centres=t["k_centres"].float()),
        lambda t, a: t.update(k_centres=t["k_centres"][:2].clone()),
        lambda t, a: t.update(k_centres=t["k_centres"][..., :8].clone()),
        lambda t, a: t["v_centres"].fill_(torch.inf),
        lambda t, a: t["k_spread"].fill_(-1),
        lambda t, a: t.update(sketch_centre=t["sketch_centre"][:, :1].clone()),
    ],
)
def test_wrong_contents_are_refused(fitted, tmp_path, change):
    with pytest.raises(ArgumentError, match=r"ModelTemplates.load: path"):
        delta.ModelTemplates.load(altered(fitted, tmp_path, change))


# --- which model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"num_hidden_layers": 4}, "layers"),
        ({"num_key_value_heads": 4}, "kv_heads"),
        ({"head_dim": 32}, "k_dim"),
        ({"v_head_dim": 8}, "v_dim"),
        ({"hidden_size": 96, "head_dim": D}, "hidden_size"),
        ({"vocab_size": 101}, "vocab_size"),
        ({"rope_theta": 5000.0}, "rope"),
        ({"rope_theta": None}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope"),
    ],
)
def test_another_model_is_refused_by_the_field(fitted, changes, field):
    with pytest.raises(ArgumentError, match=rf"model\.{field}: got"):
        delta.codecs(config(**changes), templates=fitted)


def test_the_name_does_not_matter(fitted):
    assert len(delta.codecs(config(_name_or_path="renamed"), templates=fitted)) == LAYERS


def test_no_templates_for_a_model_says_what_differs():
    with pytest.raises(ArgumentError, match=r"differs in .*layers.*fit-templates"):
        delta.codecs(config())


def test_not_a_model():
    with pytest.raises(ArgumentError, match=r"codecs: model"):
        delta.codecs(object())


def test_shapes_of_other_kinds_of_models():
    assert ModelShape.of(config(rope_theta=None)).ropes == (None,) * LAYERS
    shape = ModelShape.of(config(no_rope_layers=[1, 0, 1]))
    assert [rope is None for rope in shape.ropes] == [False, True, False]
    nested = {
        "sliding": {"rope_type": "default", "rope_theta": 1e4},
        "full": {"rope_type": "default", "rope_theta": 1e6},
    }
    kinds = ["sliding", "full", "sliding"]
    shape = ModelShape.of(config(rope_theta=None, rope_parameters=nested, layer_types=kinds))
    assert [rope.theta for rope in shape.ropes] == [1e4, 1e6, 1e4]
    assert not shape.differing(ModelShape.from_fields(shape.fields()))
    assert len(shape.fields()["ropes"]) == 2
    assert "rope" in shape.differing(ModelShape.of(config()))


def test_digest_of_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    digest = weights_digest(model)
    assert len(digest) == 32
    assert weights_digest(copy.deepcopy(model).bfloat16()) == digest
    assert weights_digest(config()) == ""
    with torch.no_grad():
        model[1].bias[1] += 1
    assert weights_digest(model) != digest


# --- codecs -----------------------------------------------------------------------------------------------------------


def test_codecs_of_a_preset(fitted):
    codecs = delta.codecs(config(), "k3v3", fitted, sinks=2)
    assert [(c.k_bits, c.v_bits, c.sinks) for c in codecs] == [(3, 3, 2)] * LAYERS
    assert [c.k_templates for c in codecs] == list(fitted.keys)
    assert all(c.rope.theta == 10000.0 for c in codecs)
    assert all(c.keeps_all_raw for c in fitted.codecs("raw"))


def test_bits_for_each_layer(fitted):
    codecs = fitted.codecs(k_bits=[2, 3, 8], v_bits=5)
    assert [(c.k_bits, c.v_bits) for c in codecs] == [(2, 5), (3, 5), (8, 5)]
    for name, bits in (("k_bits", [4, 4]), ("v_bits", [])):
        with pytest.raises(ArgumentError, match=rf"codecs: {name}"):
            fitted.codecs(**{name: bits})
    with pytest.raises(ArgumentError, match="k_bits"):
        fitted.codecs(k_bits=6)
    with pytest.raises(ArgumentError, match="preset"):
        fitted.codecs("k9v9")


def test_a_cache_needs_no_calibration(fitted):
    cache = delta.DeltaKVCache(fitted.codecs("q8"), params=fitted.params)
    for layer, (k, v, _) in enumerate(samples(1)):
        cache.append(layer, k[:32].transpose(0, 1)[None], v[:32].transpose(0, 1)[None])
    assert cache.index(0) is not None
    assert cache.index(0).params == fitted.params[0]
    k, v = cache.row(0, 0)
    want = samples(1)[0]
    assert (k.transpose(0, 1) - want.keys[:32]).norm() / want.keys[:32].norm() < 0.02
    assert (v.transpose(0, 1) - want.values[:32]).norm() / want.values[:32].norm() < 0.02


# --- what comes with the package --------------------------------------------------------------------------------------


def smollm2():
    return config(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, vocab_size=49152,
        max_position_embeddings=8192, rope_theta=100000.0,
    )  # fmt: skip


def test_templates_of_smollm2_come_with_the_package():
    (path,) = model_templates.shipped_files()
    assert path.stat().st_size <= 6_000_000
    templates = delta.ModelTemplates.of(smollm2())
    assert templates is delta.ModelTemplates.of(smollm2())  # read once
    assert "SmolLM2-135M-Instruct" in templates.shape.name
    assert templates.meta["command"].startswith("python -m sic_kernels fit-templates")
    assert delta.preload() == (templates.shape.name,)
    codecs = delta.codecs(smollm2(), "k2v2")
    assert len(codecs) == 30
    assert codecs[0].Dk == codecs[0].Dv == 64
    with pytest.raises(ArgumentError, match="differs in rope"):
        delta.codecs(types.SimpleNamespace(**{**vars(smollm2()), "rope_theta": 10000.0}))


def test_importing_reads_no_templates():
    code = "import sic_kernels.delta as d; from sic_kernels.delta import model_templates as m; print(m.shipped.cache_info())"

    assert "misses=0" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# --- reports ----------------------------------------------------------------------------------------------------------


def rows_of(seed=1):
    made = samples(seed)
    gen = torch.Generator().manual_seed(seed)
    queries = [torch.randn(20, HQ, D, generator=gen) for _ in range(LAYERS)]
    return [s.keys for s in made], [s.values for s in made], queries


def test_quality_report(fitted):
    keys, values, queries = rows_of()
    reports = {name: delta.quality_report(fitted.codecs(name), keys, values, queries=queries)
               for name in ("raw", "q8", "k4v4", "k3v3", "k2v2")}  # fmt: skip
    for report in reports.values():
        assert report.keys.shape == report.values.shape == report.outputs.shape == (LAYERS, HKV)
        assert report.size.shape == report.raw.shape == (LAYERS,)
    raw = reports.pop("raw")
    assert raw.raw.tolist() == [1.0] * LAYERS
    assert raw.keys.max() < 1e-5  # only the way there and back through RoPE
    assert raw.values.max() == 0
    errors = [r.outputs.mean().item() for r in reports.values()]
    assert errors == sorted(errors)
    assert errors[0] < 0.02 < errors[-1] < 0.5
    layer, head = reports["k2v2"].worst()
    assert reports["k2v2"].outputs[layer, head] == reports["k2v2"].outputs.max()
    assert str(reports["k2v2"]).count("\n") == LAYERS
    stand_in = delta.quality_report(fitted.codecs("k2v2"), keys, values)
    assert torch.equal(stand_in.keys, reports["k2v2"].keys)


def test_report_arguments(fitted):
    keys, values, queries = rows_of()
    codecs = fitted.codecs()
    for name, arguments in (
        ("codecs", ([1, 2, 3], keys, values, queries)), ("codecs", ([], keys, values, queries)),
        ("keys", (codecs, keys[:2], values, queries)), ("values", (codecs, keys, values[:2], queries)),
        (r"keys\[0\]", (codecs, [k[:, :1] for k in keys], values, queries)),
        (r"values\[0\]", (codecs, keys, [v[:9] for v in values], queries)),
        (r"queries\[0\]", (codecs, keys, values, [q[:, :3] for q in queries])), ("queries", (codecs, keys, values, queries[:1])),
    ):  # fmt: skip
        for op in (delta.quality_report, delta.bit_report):
            with pytest.raises(ArgumentError, match=rf"{op.__name__}: {name}"):
                op(*arguments[:3], queries=arguments[3])


def test_choose_bits(fitted):
    keys, values, queries = rows_of()
    report = delta.bit_report(fitted.codecs(), keys, values, queries=queries)
    assert report.keys.shape == report.values.shape == (LAYERS, 5)
    assert (report.keys[:, :-1] > report.keys[:, 1:]).all()
    row = (report.half_bytes, report.tag_bytes)
    assert row == (2 * 2 * D, 6)
    smallest = (report.k_bytes[0] + report.v_bytes[0] + row[1]) / row[0]
    largest = (report.k_bytes[-1] + report.v_bytes[-1] + row[1]) / row[0]
    before = None
    for size in (smallest, 0.2, 0.3, largest):
        choice = delta.choose_bits(report, size=size)
        assert choice.size <= size
        assert before is None or choice.error < before
        before = choice.error
        codecs = fitted.codecs(k_bits=choice.k_bits, v_bits=choice.v_bits)
        bytes_of_rows = sum(c.row_bytes for c in codecs) / (LAYERS * row[0])
        assert bytes_of_rows == pytest.approx(choice.size)
    assert choice.k_bits == choice.v_bits == [8] * LAYERS
    wanted = delta.choose_bits(report, error=0.05)
    assert wanted.error <= 0.05
    assert wanted.size < largest
    uniform = (report.k_bytes[1] + report.v_bytes[1] + row[1]) / row[0]  # 3 bits everywhere
    same_size = (report.keys[:, 1].square() + report.values[:, 1].square()).mean().sqrt()
    assert delta.choose_bits(report, size=uniform).error <= same_size


@pytest.mark.parametrize(
    "wanted, name",
    [({}, "size, error"), ({"size": 0.3, "error": 0.1}, "size, error"), ({"size": 0.0}, "size"), ({"size": "a"}, "size"),
     ({"size": 0.1}, "size"), ({"error": 1e-9}, "error"), ({"error": float("nan")}, "error"), ({"size": True}, "size")],
)  # fmt: skip
def test_impossible_wishes(fitted, wanted, name):
    keys, values, _ = rows_of()
    report = delta.bit_report(fitted.codecs(), keys, values)
    with pytest.raises(ArgumentError, match=rf"choose_bits: {name}"):
        delta.choose_bits(report, **wanted)
