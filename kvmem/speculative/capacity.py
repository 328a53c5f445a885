"""Capacities of drafting: rows, lengths and workspaces, checked before they are used.

A draft of width topk attends as max_batch * topk one-token sequences, each as long as
its text and the tokens drafted behind it. The law: sizes are compared in full and
always (`kvmem.serve.step` compares those of every step), never sliced to fit: an array
cut past its end is short without a word.

    attention_rows(sequences=2, width=4)               # 8
    proposable(4, length=62, longest=64)               # 1
"""

from kvmem import errors
from kvmem.geometry import Term
from kvmem.speculative.plan import SpecPlan

__all__ = [
    "attention_entries",
    "attention_rows",
    "proposable",
    "rejection_term",
    "require_entries",
    "verify_rows",
    "workspace_term",
]


def attention_rows(sequences: int, width: int) -> int:
    """Return the one-token sequences that attend for sequences of `width` chains."""
    return sequences * width


def attention_entries(rows: int, tokens: int) -> int:
    """Return the entries of a buffer with a place for every token of every row.

    Args:
        rows: that attend at once.
        tokens: of the longest row: a text, and what is drafted behind it.
    """
    return rows * tokens


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


def proposable(
    drafted: int,
    length: int,
    *,
    longest: int | None = None,
    known: int | None = None,
    width: int = 1,
) -> int:
    """Return how many of `drafted` tokens may be drafted behind `length` tokens.

    None beyond what the target or the draft can hold; then the target goes on alone.

    Args:
        drafted: tokens that are wished for, of all chains.
        length: tokens known.
        longest: of the text when it ends; its last token is fed to nobody, so it is
            not drafted.
        known: tokens of the longest text that the draft reads; it draws one more, for
            the last that it draws is not fed to it.
        width: chains, of equal length.
    """
    ends = [longest and longest - 1, known and known + 1]
    left = [end - length for end in ends if end is not None]
    return max(0, min([drafted, *(each * width for each in left)]))


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
