"""A pytest plugin that runs the tests of ops on Triton's interpreter, in sizes that it can manage.

    python -m pytest -p triton_small python_tests/test_slicing_*.py python_tests/triton_only.py python_tests/triton_delta.py

It must be loaded first: the interpreter is chosen when Triton is imported.  Grids are thinned, but so that every page
size, dtype, unit and way to join heads that they hold is left; fuzz tests draw a few examples; what only repeats another
test at a length that takes the interpreter minutes is left out, by name and with the reason.
"""

import dataclasses
import os

os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import slicing_helpers
import triton.runtime.interpreter as interpreter

# Of all that is left one in so many is run.
SHARE = int(os.environ.get("TRITON_SHARE", "1"))
EXAMPLES = 4 if SHARE == 1 else 2  # of each fuzz test
BACKEND = "triton"
OWN = ("triton_only.py", "triton_delta.py", "triton_head.py")  # files that are all about Triton

# Test -> why the interpreter does not run it.
TOO_LONG = {
    "test_decode_grid": "lengths up to 28837 and 120 cases each; grids 2, 3 and 8 hold the same kernels",
    "test_batch_sizes": "65536 rows are as many programs",
    "test_quality_on_gaussian_data": "a property of the definition, whose integers are compared bit for bit",
    "test_20_runs_are_bitwise_equal": "twenty times the same; triton_only.py repeats one call",
    "test_wide_groups_and_long_rows": "5000 tokens; triton_only.py crosses the same borders",
    "test_a_row_does_not_depend_on_its_batch": "batches of 32; triton_only.py takes 3",
    "test_omitted_mass_estimates_what_was_not_read": "3000 tokens; the estimate is compared with the definition's",
    **dict.fromkeys(
        ("test_pack_grid", "test_odd_grid", "test_edge_grid", "test_attention_grid"),
        "hundreds of cases of the delta ops; triton_delta.py takes a share of them",
    ),
    "test_softmax_join_approximates_log_of_summed_softmax": "a property of the definition",
}
# Grid -> how many of its cases are kept, evenly spread.
KEPT = {
    "test_per_head_grid": 2,
    "test_topk_grid": 3,
    "test_sketch_grid": 11,
    "test_summary_grid": 7,
    "test_score_grid": 9,
    "test_refine_grid": 5,
    "test_page_score_grid": 7,
    "test_gather_grid": 7,
    "test_merge_grid": 5,
    "test_head_size_grid": 5,
    "test_group_grid": 5,
    "test_loops_make_the_same_bits": 5,
    "test_loops_make_the_same_scores": 5,
    "test_append_equals_rebuild": 7,
    "test_full_density_is_dense_bit_for_bit": 4,
    "test_ratio_one_is_dense_bit_for_bit": 2,
    "test_heads_above_the_limit_are_recomputed_dense": 1,
    "test_two_stages_are_score_shortlist_refine_select_attend": 1,
    "test_layouts": 3,
    "test_start_writes_only_from_its_page_on": 3,
    "test_extras_against_loops": 11,
    "test_results_of_nonfinite_inputs": 17,
    "test_integers_of_nonfinite_inputs": 11,
    "test_nonfinite_values_keep_to_their_channel": 5,
    "test_an_estimate_that_is_not_finite": 19,
    "test_start_rebuilds_from_its_page_on": 7,
    "test_every_key_lies_within_centre_and_radius": 5,
    "test_grid": 31,
    "test_keep_select_grid": 13,
    "test_keep_attend_grid": 4,
    "test_select_slice_is_attend_before_its_attention": 5,
    "test_select_slice_grid": 4,
    "test_wrong_spans": 7,
}


def few_examples(*args, **kwargs):
    kwargs["max_examples"] = min(EXAMPLES, kwargs.get("max_examples", EXAMPLES))
    return _settings(*args, **kwargs)


def speed_up():
    """The interpreter patches Triton's language once a module, not once a nested call, and checks no overflow."""
    patched = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def size_of(item):
    """Tokens of a test's case, or 0."""
    case = item.callspec.params.get("case")
    shape = item.callspec.params if case is None else case.shape
    words = str(shape.get("lens", shape.get("len", shape.get("length", "")))).split("_")
    return sum(int(word) for word in words if word.isdigit())


def pytest_collection_modifyitems(config, items):
    by_test = {}
    for item in items:
        own = item.path.name in OWN
        backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        if own or (backend == BACKEND and item.originalname not in TOO_LONG):
            by_test.setdefault((item.path, item.originalname), []).append(item)
    kept = []
    for (_, name), group in by_test.items():
        group = [item for item in group if not hasattr(item, "callspec") or size_of(item) < 5000]
        step = -(-len(group) // KEPT[name]) if name in KEPT else 1
        kept += group[::step]
    kept = kept[::SHARE]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


_settings = hypothesis.settings
for profile_name in ("register_profile", "load_profile", "get_profile", "default"):
    if hasattr(_settings, profile_name):
        setattr(few_examples, profile_name, getattr(_settings, profile_name))
hypothesis.settings = few_examples
slicing_helpers.NATIVE[:] = [BACKEND]  # the lists that the tests are parametrised with
slicing_helpers.EVERY[:] = [BACKEND]
speed_up()
