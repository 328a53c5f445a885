"""A byte of a budget is claimed once."""

import pytest

from kvmem import errors
from kvmem.manage import Claims, reserve

GIB = 1 << 30


@pytest.mark.case("BUD-02")
def test_a_second_owner_of_the_whole_budget_is_refused_with_both_names():
    pages = 8 * GIB // (32 * (64 + 16) * 1024)
    claims = reserve(Claims(8 * GIB), "target", pages * 32 * 64 * 1024)
    with pytest.raises(errors.OutOfPages) as said:
        reserve(claims, "draft", 8 * GIB)
    for part in (
        "draft asks for 8,589,934,592",
        "target has 6,870,269,952",
        "1,719,66",
    ):
        assert part in str(said.value)
    both = reserve(claims, "draft", pages * 32 * 16 * 1024)
    assert pages == 3_276 and pages * 32 == 104_832
    assert both.nbytes - both.left_nbytes == 8_587_837_440
    assert claims.taken == (("target", 6_870_269_952),)  # the refused ask left no trace


def test_the_first_owner_may_have_everything_and_no_byte_more():
    assert reserve(Claims(GIB), "target", GIB).left_nbytes == 0
    with pytest.raises(errors.OutOfPages, match="nobody has any"):
        reserve(Claims(GIB), "target", GIB + 1)


def test_an_owner_claims_once():
    claims = reserve(Claims(GIB), "target", 1)
    with pytest.raises(errors.Conflict, match="claimed 1 B"):
        reserve(claims, "target", 1)


def test_a_claim_is_not_below_zero():
    with pytest.raises(errors.ConfigError, match="claim of -1 B"):
        reserve(Claims(GIB), "target", -1)
