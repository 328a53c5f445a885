"""Every mode on every kind of memory and sharding: the tokens that plain steps give.

The product is a long one, but for a few cases. What it says of itself is counted here:
33 cases of 9 prompts, 297 prompts in all, on poisoned pools whose laws are checked
after every step.
"""

import numpy as np
import pytest

from kvmem.serve import SamplingParams

PROMPTS = 9
MODES = ("ngram", "two_engine", "mtp", "dspark", "dflash", "frozen_kv")
CASES = [
    *[(mode, "full", {"tp": 2, "page_size": 16}) for mode in MODES],
    *[(mode, "full", {"dcp": 2}) for mode in MODES],
    ("ngram", "window", {}),
    ("two_engine", "window", {}),
    ("frozen_kv", "window", {"page_size": 8}),
    ("ngram", "window", {"tp": 2}),
    ("frozen_kv", "window", {"dcp": 2}),
    ("ngram", "state", {"page_size": 8, "pages": 60}),
    ("two_engine", "state", {}),
    ("ngram", "state", {"tp": 2}),
    ("ngram", "indexer", {}),
    ("two_engine", "indexer", {"page_size": 8}),
    ("frozen_kv", "indexer", {}),
    ("two_engine", "indexer", {"tp": 2}),
    ("mtp", "window", {"dcp": 2, "pages": 80}),
    ("mtp", "state", {}),
    ("mtp", "state", {"page_size": 8, "pages": 60}),
    ("mtp", "indexer", {"tp": 2}),
    ("dspark", "window", {}),
    ("dspark", "state", {"tp": 2}),
    ("dspark", "indexer", {"page_size": 8}),
    ("dflash", "window", {"tp": 2}),
    ("dflash", "state", {"dcp": 2}),
    ("dflash", "indexer", {}),
]
BRIEF = (28, 33)  # of the product, in every run


def prompts_of(case):
    """Texts of all lengths, half of them of stems that come again."""
    rng = np.random.default_rng(case)
    found = []
    for at in range(PROMPTS):
        length = 3 + 4 * at + case % 3
        stem = rng.integers(0, 256, 5 if at % 2 else length).tolist()
        found.append((stem * length)[:length])
    return found


def test_the_product_has_two_hundred_prompts_and_every_mode():
    assert len(CASES) * PROMPTS == 306 >= 200
    assert {mode for mode, _, _ in CASES} == set(MODES)
    assert {kind for _, kind, _ in CASES} == {"full", "window", "state", "indexer"}
    asked = {fact for _, _, shape in CASES for fact in shape}
    assert asked >= {"tp", "dcp", "page_size"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            at,
            marks=[] if at in BRIEF else [pytest.mark.long],
            id="-".join(each[:2]),
        )
        for at, each in enumerate(CASES)
    ],
)
def test_greedy_tokens_are_those_of_plain_steps_on_one_rank(drafted, case):
    mode, kind, shape = CASES[case]
    greedy = SamplingParams(max_tokens=14, ignore_eos=True)
    prompts = prompts_of(case)
    plain = drafted(None, kind=kind).generate(prompts, greedy)
    engine = drafted(mode, kind=kind, **shape)
    outputs = engine.generate(prompts, greedy)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    again = engine.generate(prompts[-1], greedy)[0]
    assert again.cached_tokens > 0 or kind == "state"  # whose snapshot had to go
    assert again.output_ids == plain[-1].output_ids
    stats = engine.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    assert engine.accounts.in_use == 0
    budget, pages = engine.budget, getattr(engine.verifier.proposer, "pages", None)
    assert engine.pool.pages[0].nbytes == sum(pool.nbytes for pool in budget.pools)
    if mode in ("dspark", "dflash"):  # in pages of their own, which were paid for
        assert pages[0].nbytes == budget.draft_pages * budget.draft_page_nbytes > 0
