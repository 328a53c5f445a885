"""Published figures of SGLang's budget rules."""

import pytest

from kvmem.budget import sglang

GIB = 1 << 30


@pytest.mark.parametrize(
    ("sizes", "more", "tokens"),
    [
        ((8, 4, 2), {"chunk": 4, "drafted": 5, "reserved": 16}, 104),
        ((8, 1, 2), {"chunk": 4, "drafted": 5, "reserved": 6, "overlap": True}, 91),
        ((4, 1, 10), {}, 100),
        ((4, 1, 10), {"extra_slots": 2}, 110),
        ((8, 4, 2), {"chunk": 16, "overlap": True}, 76),
    ],
)
def test_a_window_pool_capped_by_what_runs(sizes, more, tokens):
    assert sglang.window_cap(*sizes, **more) == tokens


STATE, TOKEN = 19_316_736, 12_288  # Qwen3-Next on four ranks


def test_states_and_tokens_divide_what_is_left():
    plain = sglang.state_slots(40 * GIB, STATE, TOKEN, charges_padding=False)
    assert plain[:2] == (1_052, 1_841_509)
    assert sglang.state_slots(40 * GIB, STATE, TOKEN)[:2] == (1_052, 1_839_937)


@pytest.mark.parametrize(
    ("held", "slots", "requests", "scratch"),
    [(5, 582, 116, 8.42), (4, 524, 131, 9.50), (3, 449, 149, 10.79)],
)
def test_speculation_keeps_states_for_its_drafts(held, slots, requests, scratch):
    found = sglang.state_slots(40 * GIB, STATE, TOKEN, draft_tokens=4, per_request=held)
    assert (found.slots, found.requests) == (slots, requests)
    assert round(found.scratch_nbytes / GIB, 2) == scratch
    states = STATE * (slots + 1) + found.scratch_nbytes
    assert states <= 0.9 / 1.9 * 40 * GIB < 18.948 * GIB
    assert states + found.tokens * TOKEN <= 40 * GIB
