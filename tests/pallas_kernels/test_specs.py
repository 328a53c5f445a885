"""The list of cases: real sizes, hostile ids, and every operation on it."""

import numpy as np
import pytest

from pallas_kernels import dispatch, fillings, specs


def by_name(name: str) -> specs.Model:
    return next(m for m in (*specs.MODELS, *specs.TINY) if m.name == name)


@pytest.mark.parametrize(
    ("name", "page_nbytes"),
    [
        ("llama3_8b_tp1_page16", 2_097_152),
        ("llama3_8b_tp8_page64", 1_048_576),
        ("deepseek_v32_latent", 4_497_408),
        ("deepseek_v32_indexer", 515_328),
        ("gpt_oss_120b", 589_824),
    ],
)
def test_pages_of_published_models_have_their_published_sizes(name, page_nbytes):
    assert by_name(name).page_nbytes == page_nbytes


@pytest.mark.parametrize("models", [specs.MODELS, specs.TINY], ids=["real", "tiny"])
def test_every_operation_has_cases_and_supports_them_all(models):
    seen = set()
    for model in models:
        for case in specs.cases(model, 32 << 30 if models is specs.MODELS else 1, 64):
            seen.add(case.operation)
            op = dispatch.OPERATIONS[case.operation]
            assert op.supports(*case.structs(), **case.facts) is None, case.name
    assert seen == set(dispatch.OPERATIONS)


def test_fillings_are_as_declared_and_ids_are_hostile():
    for case in specs.cases(by_name("tiny_latent"), 1 << 15, 6):
        made = fillings.fill(case, seed=3)
        for array, argument in zip(made, case.arguments, strict=True):
            assert (array.shape, str(array.dtype)) == (argument.shape, argument.dtype)
        if case.operation == "gather_pages":
            ids = np.asarray(made[1]).tolist()
            assert len(made[0]) in ids and -1 in ids
        if case.operation == "rerope":
            assert np.isfinite(np.asarray(made[0]).view(np.float16)).all()


def test_pages_of_a_filling_differ():
    (case, *_) = specs.cases(by_name("tiny_latent"), 1 << 18, 6)
    pages = np.asarray(fillings.fill(case, seed=3)[0])
    assert len({page.tobytes() for page in pages}) == len(pages)


BIG = {
    case.name: case
    for name in ("llama3_8b_tp8_page16", "deepseek_v32_beside", "deepseek_v32_indexer")
    for case in specs.cases(by_name(name), 32 << 30, 64)
    if case.variant != "staged"
}


def test_cases_that_are_lowered_have_every_operation():
    assert {case.operation for case in BIG.values()} == set(dispatch.OPERATIONS)


@pytest.mark.parametrize("name", BIG)
def test_every_operation_lowers_for_cuda_at_the_sizes_of_models(name, prove):
    case = BIG[name]
    op = dispatch.OPERATIONS[case.operation]
    assert case.operation in prove.lowers(op, case.structs(), **case.facts)
