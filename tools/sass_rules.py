"""What tools/sass_gate.py demands of the machine code of each CUDA kernel, on every architecture.

Every kernel needs a rule; the first whose pattern matches the whole name counts. That no kernel spills or uses local memory
is demanded of all and stands nowhere below. Ceilings follow from the threads that a multiprocessor should hold
(`__launch_bounds__`): 65536 registers / threads, in steps of 8.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rule:
    """registers: at most.  needs: operations that must occur; "LDG.128" is a load of 16 bytes, however it is cached."""

    pattern: str
    registers: int
    needs: tuple[str, ...] = ()


# Registers a thread may have so that a multiprocessor holds so many threads.
HOLDS_1024, HOLDS_768, HOLDS_640, HOLDS_512, HOLDS_384 = 64, 80, 96, 128, 168
ANY = 255

RULES = (
    # attention: the tensor-core tiles of 8 or 16 query rows by head size, the same on CUDA cores, joining splits
    Rule(r"attention_mma<\w+, 64, 1, \w+>", HOLDS_512, ("LDG.128", "HMMA")),
    Rule(r"attention_mma<\w+, (64, 2|128, 1), \w+>", HOLDS_384, ("LDG.128", "HMMA")),
    Rule(r"attention_mma<.*>", ANY, ("LDG.128", "HMMA")),
    Rule(r"attention_simt<\w+, 1, true>", HOLDS_640, ("LDG.128",)),
    Rule(r"attention_simt<\w+, 1, false>", HOLDS_640),
    Rule(r"attention_simt<\w+, \d, true>", HOLDS_384, ("LDG.128",)),
    Rule(r"attention_simt<.*>", HOLDS_384),
    Rule(r"attention_merge", HOLDS_768),
    # the scan of a sketch; (Columns)2: sixteen queries at once
    Rule(r"scan_mma<\d+, \(Columns\)2, \w+>", HOLDS_512, ("LDGSTS.128", "IMMA")),
    Rule(r"scan_mma<.*>", HOLDS_768, ("LDGSTS.128", "IMMA")),
    Rule(r"scan_prepare<.*>", HOLDS_512, ("LDG.128",)),
    Rule(r"scan_any<.*>", HOLDS_512),
    Rule(r"join_(tops|weights|write.*)", HOLDS_1024, ("LDG.128",)),
    # pages
    Rule(r"score_pages_kernel<.*>", HOLDS_512, ("LDG.128",)),
    Rule(r"page_summary_kernel<f8_t>", HOLDS_512),  # eight channels are 8 bytes
    Rule(r"page_summary_kernel<.*>", HOLDS_512, ("LDG.128",)),
    Rule(r"join_pages_kernel", HOLDS_1024),
    Rule(r"adjust_page_scores", HOLDS_1024),
    # selection
    Rule(r"select_keep", HOLDS_1024),
    Rule(r"select_\w+<.*>", HOLDS_1024, ("LDG.128",)),
    # attend
    Rule(r"attend_rows<.*>", HOLDS_1024, ("LDG.128",)),
    Rule(r"unread_tokens", HOLDS_1024, ("LDG.128",)),
    Rule(r"unread_(pages<.*>|total)", HOLDS_1024),
    Rule(r"fill_dense", HOLDS_1024),
    # writing and copying; R = 4: head sizes above 256
    Rule(r"key_sketch_kernel<\w+, 4, \w+>", ANY),
    Rule(r"key_sketch_kernel<f8_t, 1, false>", HOLDS_512),
    Rule(r"key_sketch_kernel<f8_t, 1, true>", HOLDS_768),
    Rule(r"key_sketch_kernel<\w+, 1, false>", HOLDS_512, ("LDG.128",)),
    Rule(r"key_sketch_kernel<\w+, 1, true>", HOLDS_768, ("LDG.128",)),
    Rule(r"append_rows_kernel<\w+, 4, \w+>", ANY, ("LDG.128",)),
    Rule(r"append_rows_kernel<.*>", HOLDS_512, ("LDG.128",)),
    Rule(r"append_summaries_kernel<.*>", HOLDS_512),
    Rule(r"enter_rows_kernel", HOLDS_1024),
    Rule(r"gather_rows_kernel<uint4>", HOLDS_1024, ("LDG.128", "STG.128")),
    Rule(r"gather_rows_kernel<.*>", HOLDS_1024),
    Rule(r"list_(totals|starts)_kernel", HOLDS_1024),
    Rule(r"merge_kernel<.*>", HOLDS_512, ("LDG.128",)),
    # coded rows; R = 4: head sizes above 256
    Rule(r"encode_rows<1, true>", HOLDS_512, ("LDG.128", "IMMA")),
    Rule(r"encode_rows<.*>", ANY, ("LDG.128", "IMMA")),
    Rule(r"settle_table", HOLDS_512),
    Rule(r"write_raw_rows", HOLDS_1024),
    Rule(r"decode_rows<\w+, 4, \w+>", ANY, ("LDG.128", "STG.128")),
    Rule(r"decode_rows<.*>", HOLDS_768, ("LDG.128", "STG.128")),
    Rule(r"attention_codes<4, \w+>", HOLDS_384, ("LDG.128", "HMMA")),
    Rule(r"attention_codes<.*>", ANY, ("LDG.128", "HMMA")),
    Rule(r"attention_coded_rows<\d, 4, \w+>", ANY, ("LDG.128",)),
    Rule(r"attention_coded_rows<.*>", HOLDS_384, ("LDG.128",)),
    # rows between padded and packed
    Rule(r"(un)?pack_rows_kernel<uint4, \w+>", HOLDS_1024, ("LDG.128", "STG.128")),
    Rule(r"(un)?pack_rows_kernel<.*>", HOLDS_1024),
    # statistics of logits and of an LM head; HMMA: 8, 16 or 32 rows of hidden states
    Rule(r"logits_segments<\w+>", HOLDS_768, ("LDG.128",)),
    Rule(r"lm_head_mma<.*>", HOLDS_512, ("LDG.128", "HMMA")),
    Rule(r"lm_head_simt<float>", HOLDS_512, ("LDG.128",)),
    Rule(r"lm_head_simt<.*>", HOLDS_512),
    Rule(r"(logits|lm_head)_finish", HOLDS_1024),
    Rule(r"merge_stats_kernel", HOLDS_1024),
    Rule(r"probe_kernel", HOLDS_1024, ("LDG.128",)),
    Rule(r"termination_kernel", HOLDS_1024),
    # what a captured segment reads, its mark, random numbers
    Rule(r"(set|mark)_step_kernel", HOLDS_1024),
    Rule(r"uniform_kernel<true>", HOLDS_1024, ("STG.128",)),
    Rule(r"uniform_kernel<false>", HOLDS_1024),
)
