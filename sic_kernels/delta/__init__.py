"""A KV cache as differences from templates, at a quarter of its size.

    codec = sic.delta.Codec.preset("k4v4", k_templates, v_templates, sic.delta.Rope.from_config(model.config))
    pages = sic.delta.DeltaPages.allocate(codec, num_pages, page_size, Hkv, Dk, Dv)
    sic.delta.encode(codec, k, v, positions, slots, pages)
    out, lse = sic.delta.delta_attention(q, codec, pages, block_table, seq_lens)

Templates belong to a model: fitted once (`fit_templates`) on any text, shared by all sequences. A row is the id of the nearest
template, the rotated residual in 2 to 8 bits a channel, and one half-precision scale; keys are coded before RoPE, so that a page
can be read at another position. Conventions of arrays, block tables, lengths, `out`, `workspace`, determinism and errors are
those of `sic_kernels.slicing`.
"""

from .blob import Blob, BlobError, inspect_blob, pack_blob, unpack_blob
from .block_index import BlockIndex, IndexFull, IndexStats
from .cache import DeltaKVCache
from .codec import PRESETS, Codec
from .fit import fit_templates
from .model_fit import LayerSamples, fit_model_templates
from .model_templates import ModelTemplates, codecs, preload
from .ops import RawTail, decode, delta_attention, encode, workspace_bytes
from .pages import DeltaPages
from .quality import BitChoice, BitReport, QualityReport, bit_report, choose_bits, quality_report
from .rope import Rope
from .templates import Templates

__all__ = [
    "PRESETS",
    "BitChoice",
    "BitReport",
    "Blob",
    "BlobError",
    "BlockIndex",
    "Codec",
    "DeltaKVCache",
    "DeltaPages",
    "IndexFull",
    "IndexStats",
    "LayerSamples",
    "ModelTemplates",
    "QualityReport",
    "RawTail",
    "Rope",
    "Templates",
    "bit_report",
    "choose_bits",
    "codecs",
    "decode",
    "delta_attention",
    "encode",
    "fit_model_templates",
    "fit_templates",
    "inspect_blob",
    "pack_blob",
    "preload",
    "quality_report",
    "unpack_blob",
    "workspace_bytes",
]
