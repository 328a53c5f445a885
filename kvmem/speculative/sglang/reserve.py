"""Reservations: the tokens that a verification keeps for each sequence.

alloc_length(steps=3, topk=4, draft_tokens=16, page_size=64)    # 512
row_headroom(3, 4, 16, 64)                                      # 1,087
"""

__all__ = ["alloc_length", "reserve_length", "row_headroom"]


def alloc_length(
    steps: int,
    topk: int,
    draft_tokens: int,
    page_size: int,
    *,
    has_draft_rows: bool = True,
) -> int:
    """Return the tokens that one verification allots to a sequence.

    A tree of draft rows has whole pages for each of its topk branches, since branches
    share no page.
    """
    if page_size == 1 or topk == 1 or not has_draft_rows:
        return max(steps * topk, draft_tokens)
    pages = -(-(page_size - 1 + steps) // page_size)
    return max(pages * page_size * topk, draft_tokens)


def reserve_length(steps: int, topk: int, draft_tokens: int, page_size: int) -> int:
    """Return the tokens reserved while one step runs and the next is prepared."""
    return 2 * alloc_length(steps, topk, draft_tokens, page_size)


def row_headroom(steps: int, topk: int, draft_tokens: int, page_size: int) -> int:
    """Return the tokens by which a request's row is wider than the context.

    Below it a reservation is written into the next request's row (#26972).
    """
    plain = 4 + draft_tokens
    if page_size == 1:
        return plain
    reserved = reserve_length(steps, topk, draft_tokens, page_size)
    return max(plain, reserved + page_size - 1)
