"""What an SGLang server would allot: its published rules, as arithmetic.

For those who plan such a stack, or move a deployment over: kvmem's engines do not ask
here. What a draft costs there, and what it reserves, is in `kvmem.speculative.sglang`.

    window_cap(8, 4, 2, chunk=16, overlap=True)     # 76 tokens of a window pool
"""

from typing import NamedTuple

__all__ = [
    "StateSlots",
    "state_slots",
    "window_cap",
]


def window_cap(
    window: int,
    page_size: int,
    requests: int,
    *,
    chunk: int | None = None,
    interval: int = 4,
    drafted: int = 1,
    reserved: int | None = None,
    overlap: bool = False,
    extra_slots: int = 0,
) -> int:
    """Return the tokens of a window pool that is capped by what runs at once.

    Args:
        window, page_size: of the pool.
        requests: that run at once.
        chunk: tokens of a prefill chunk; None where decode alone runs.
        interval: decode steps between two evictions.
        drafted: tokens that a request verifies in a step.
        reserved: tokens that a verification allots to it; None: no draft, a page.
        overlap: whether the next step is prepared while one runs.
        extra_slots: requests whose windows arrive from a prefill server.
    """
    decode = page_size if reserved is None else reserved * (2 if overlap else 1)
    each = window + interval * drafted + page_size + decode
    cap = each * requests + (window + page_size) * extra_slots
    if chunk is not None:
        cap += (2 if overlap else 1) * chunk + page_size
    return -(-cap // page_size) * page_size


class StateSlots(NamedTuple):
    """How many states a hybrid model gets, and what is left for tokens.

    `requests` and `scratch_nbytes` are those of speculation, None and 0 without.
    """

    slots: int
    tokens: int
    requests: int | None = None
    scratch_nbytes: int = 0


def state_slots(
    nbytes: int,
    state_nbytes: int,
    token_nbytes: int,
    *,
    ratio: float = 0.9,
    draft_tokens: int = 0,
    per_request: int = 5,
    charges_padding: bool = True,
) -> StateSlots:
    """Divide bytes between states and tokens by a ratio, the padding slot first.

    Args:
        nbytes: what weights have left.
        state_nbytes: of one slot, all layers.
        token_nbytes: of one token's keys and values.
        ratio: of states to tokens, in bytes.
        draft_tokens: that a verification keeps states for; 0: no speculation.
        per_request: slots that a request holds.
        charges_padding: whether the padding slot is taken from the tokens too; without
            it half a gigabyte is hidden (#32184).
    """
    share = nbytes * ratio / (1 + ratio)
    free = share - state_nbytes * (1 + draft_tokens)
    slots = int(free // (state_nbytes * (1 + draft_tokens / per_request)))
    requests = slots // per_request if draft_tokens else None
    scratch = state_nbytes * (requests + 1) * draft_tokens if draft_tokens else 0
    taken = state_nbytes * (slots + charges_padding) + scratch
    return StateSlots(slots, (nbytes - taken) // token_nbytes, requests, scratch)
