"""Capacities of drafting: rows, lengths and workspaces, checked before they are used.

A draft of width topk attends as max_batch * topk one-token sequences, each as long as
the longest text and the tokens drafted behind it. The law: sizes are compared in full
and always, never sliced to fit: an array cut past its end is short without a word.

    attention_rows(SpecPlan("frozen_kv", topk=4, max_batch=2))       # 8
    proposable(SpecPlan("ngram", max_length=64, draft_max_length=32), length=33)    # 0
"""

from kvmem import errors
from kvmem.geometry import Term
from kvmem.speculative.plan import SpecPlan

__all__ = [
    "attention_entries",
    "attention_rows",
    "proposable",
    "publishable_pages",
    "rejection_term",
    "require_entries",
    "row_entries",
    "verify_rows",
    "workspace_term",
]


def attention_rows(plan: SpecPlan) -> int:
    """Return the one-token sequences that the draft's attention runs at most."""
    return plan.max_batch * plan.width


def row_entries(plan: SpecPlan) -> int:
    """Return the tokens of the longest row: a text, and what is drafted behind it."""
    return plan.max_length + plan.num_drafted


def attention_entries(plan: SpecPlan) -> int:
    """Return the entries of a buffer with a place for every token of every row."""
    return attention_rows(plan) * row_entries(plan)


def verify_rows(sequences: int, drafted: int, multiple: int = 1) -> int:
    """Return the rows of a step that verifies, padded to a multiple.

    Each sequence has a row for each drafted token and one of its own.
    """
    rows = sequences * (drafted + 1)
    return -(-rows // multiple) * multiple


def require_entries(what: str, held: int, needed: int) -> None:
    """Refuse a buffer that is smaller than what goes into it.

    Raises:
        OutOfPages: with both numbers.
    """
    if held < needed:
        raise errors.OutOfPages(
            errors.say(
                f"{what} of {held:,} entries",
                f"{needed:,} are needed: sequences at once, times topk, times the "
                "tokens of a row",
                f"Give it {needed:,}, or run fewer sequences, a smaller topk or "
                "shorter texts",
            )
        )


def proposable(plan: SpecPlan, length: int) -> int:
    """Return how many of the planned tokens may be drafted behind `length` tokens.

    None beyond what the draft or the target can hold; then the target goes on alone.
    """
    longest = min(plan.max_length, plan.draft_max_length or plan.max_length)
    return max(0, min(plan.num_drafted, longest - length))


def publishable_pages(committed: int, page_size: int) -> int:
    """Return the pages that may be kept for reuse: those full of accepted tokens.

    Args:
        committed: tokens whose rows are written and accepted; drafted ones are not.
        page_size: tokens of a page.
    """
    return committed // page_size


def workspace_term(plan: SpecPlan, row_nbytes: int, name: str = "logits") -> Term:
    """Return what verification holds beside the pools, owed before the first page.

    Args:
        plan: whose max_batch sequences verify at once.
        row_nbytes: of one row: a sequence's own token, or a drafted one.
        name: what a row is of.
    """
    rows = verify_rows(plan.max_batch, plan.num_drafted)
    return Term(f"verify {name}", "draft", 0, fixed_bytes=rows * row_nbytes)


def rejection_term(plan: SpecPlan, row_nbytes: int) -> Term:
    """Return what exact rejection holds beside logits: the target's probabilities of
    each row that is verified, and the draft's of each drafted token.

    Args:
        plan: whose max_batch sequences verify at once.
        row_nbytes: of the probabilities of one row.
    """
    rows = verify_rows(plan.max_batch, plan.num_drafted)
    rows += plan.max_batch * plan.num_drafted
    return Term("verify probabilities", "draft", 0, fixed_bytes=rows * row_nbytes)
