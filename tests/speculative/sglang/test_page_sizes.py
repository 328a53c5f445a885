"""Page sizes: each backend's as published, intersected over every one that runs."""

import itertools

import pytest

from kvmem import errors
from kvmem.speculative import sglang

BLACKWELL = ("trtllm_mla", "tokenspeed_mla", "cutedsl_mla")
SIZES = [  # backend, further facts, sizes it reads, what a server takes for another
    ("flashmla", {}, {64}, 64),
    ("cutlass_mla", {}, {128}, 128),
    *((name, {}, {32, 64}, 64) for name in BLACKWELL),
    ("trtllm_mha", {}, {16, 32, 64, 128}, 64),
    ("trtllm_mha", {"flashinfer": (0, 6, 11)}, {16, 32, 64}, 64),
    ("trtllm_mha", {"equal_dims": False}, {16, 32, 64}, 64),
    ("hpc_ops", {}, {64}, 64),
    ("fa4", {"arch": "sm100"}, {128}, 128),
    ("intel_xpu", {}, {64, 128}, 128),
    ("intel_xpu", {"is_latent": True}, {16, 32, 64, 128}, 128),
]
ASKED = (1, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("role", ["attention", "prefill", "decode", "draft"])
@pytest.mark.parametrize(("name", "facts", "sizes", "fallback"), SIZES)
def test_each_backend_reads_its_sizes_in_every_role(
    plan_of, broken, role, name, facts, sizes, fallback
):
    for asked in ASKED:
        plan = plan_of(page_size=asked, **facts, **{role: name})
        assert sglang.resolve(plan) == (asked if asked in sizes else fallback)
        refused = "page size" in broken(page_size=asked, **facts, **{role: name})
        assert refused == (asked not in sizes)


def test_a_page_size_that_only_the_draft_backend_refuses(plan_of):
    for asked, taken in ((1, 64), (16, 16), (32, 32), (64, 64)):
        plan = plan_of(page_size=asked, draft="trtllm_mha", attention="triton")
        assert sglang.resolve(plan) == taken


@pytest.mark.parametrize(
    "facts",
    [
        {"attention": "triton"},
        {"attention": "fa4", "arch": "sm90"},
        {"attention": "fa4", "arch": "sm100", "is_latent": True},
        {"attention": "fa4", "arch": "sm100", "topk": 2},
        {},
    ],
)
def test_other_backends_read_any_page(plan_of, facts):
    for asked in ASKED:
        assert sglang.resolve(plan_of(page_size=asked, **facts)) == asked


def test_two_that_clash_are_both_named(plan_of, broken):
    facts = {"attention": "triton", "decode": "flashmla", "draft": "cutlass_mla"}
    assert broken(**facts, pool_kind="split") == {"page sizes in common"}
    with pytest.raises(errors.IncompatiblePlan) as refused:
        sglang.resolve(plan_of(**facts))
    said = str(refused.value)
    assert "decode flashmla (64) with draft cutlass_mla (128)" in said
    assert "triton" not in said


@pytest.mark.parametrize(
    ("facts", "size"),
    [
        ({"prefill": "trtllm_mha", "decode": "trtllm_mla"}, 64),
        ({"attention": "flashmla", "draft": "trtllm_mla"}, 64),
        ({"attention": "cutlass_mla", "draft": "intel_xpu"}, 128),
        ({"attention": "trtllm_mha", "model_kind": "compressed"}, 128),
    ],
)
def test_sets_are_intersected_and_no_backend_has_the_last_word(plan_of, facts, size):
    for asked in (1, 7, 96):
        assert sglang.resolve(plan_of(page_size=asked, **facts)) == size


def test_the_order_of_backends_does_not_matter(plan_of):
    names = [name for name, facts, _, _ in SIZES if not facts]
    for names_of in itertools.product(names, repeat=3):
        found = {
            sglang.allowed(plan_of(prefill=a, decode=b, draft=c)).sizes
            for a, b, c in itertools.permutations(names_of)
        }
        assert len(found) == 1


def test_compressed_rows_take_multiples_of_128(plan_of, broken):
    for asked, refused in ((128, False), (256, False), (64, True), (192, True)):
        found = broken(page_size=asked, model_kind="compressed", pool_kind="split")
        assert ("page size" in found) == refused


def test_a_server_that_was_given_none():
    default = sglang.page_sizes.default
    assert [default(arch) for arch in (None, "sm90", "musa", "rocm")] == [1, 1, 64, 1]
    assert default("rocm", is_vectorized=True) == 64
