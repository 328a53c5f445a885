"""What an SGLang server would allot: its published rules, as arithmetic.

For those who plan such a stack, or move a deployment over: kvmem's engines do not ask
here. Two of the rules are known to be wrong in general and are kept as they are, so
that a plan can show what they would do: the layer ratio prices every draft as if it had
the target's layers, and holds for drafts of the target's shape alone (#34234); EAGLE's
term does not grow with decode context parallelism (#33912).

    draft_cell(heads=8, head_dim=128, layers=5)           # 20,480 B a token
    layer_ratio_cell(65_536, layers=32, draft_layers=5)   # 75,776, target included
"""

from typing import NamedTuple

from kvmem import errors

__all__ = [
    "StateSlots",
    "alloc_length",
    "draft_cell",
    "draft_pool_shape",
    "layer_ratio_cell",
    "replicated_rows",
    "state_slots",
    "window_cap",
]


def draft_cell(
    heads: int, head_dim: int, layers: int, *, item_nbytes: int = 2, dcp: int = 1
) -> int:
    """Return a draft's bytes a target row by its own geometry, on every dcp rank.

    Args:
        heads: KV heads on the rank.
        head_dim: elements of a key, and of a value.
        layers: of the draft.
        item_nbytes: bytes of an element.
        dcp: ranks that share the target's tokens, and hold all of the draft's.
    """
    return heads * 2 * head_dim * layers * item_nbytes * dcp


def layer_ratio_cell(
    target_nbytes: int, *, layers: int, draft_layers: int | None, dcp: int = 1
) -> int:
    """Return target and draft bytes a row, the draft priced by the ratio of layers.

    `draft_layers` None: no draft, and nothing is scaled.
    """
    grown = 0 if draft_layers is None else target_nbytes * draft_layers * dcp // layers
    return target_nbytes + grown


def replicated_rows(rows: int, dcp: int, scaled_by: int = 1) -> int:
    """Return the rows of a buffer that every dcp rank keeps whole.

    Args:
        rows: of the pool.
        dcp: ranks that share its tokens.
        scaled_by: what `rows` were multiplied with before: 1 or dcp.

    Raises:
        ConfigError: rows that were scaled by something else, or would be twice.
    """
    if scaled_by not in (1, dcp) or rows % scaled_by:
        raise errors.ConfigError(
            errors.say(
                f"{rows:,} rows scaled by {scaled_by} with DCP {dcp}",
                "rows are multiplied by dcp once",
                f"Pass rows as they are (1) or multiplied by {dcp}",
            )
        )
    return rows // scaled_by * dcp


def draft_pool_shape(
    tokens: int, page_size: int, *, heads: int, head_dim: int, tp: int, dcp: int = 1
) -> tuple[int, int, int]:
    """Return (rows, heads, elements) of a draft's key tensor, and of its values.

    `tp` divides the heads of the draft, context parallel ranks among them; one page
    more than the tokens is the sink of padding.
    """
    return (tokens + page_size) * dcp, max(1, heads // tp), head_dim


def alloc_length(steps: int, topk: int, draft_tokens: int, page_size: int) -> int:
    """Return the tokens that one verification reserves for a sequence."""
    if page_size == 1 or topk == 1:
        return max(steps * topk, draft_tokens)
    pages = -(-(page_size - 1 + steps) // page_size)
    return max(pages * page_size * topk, draft_tokens)


def window_cap(
    window: int,
    page_size: int,
    requests: int,
    *,
    chunk: int | None = None,
    interval: int = 4,
    spec: tuple[int, int, int] | None = None,
    overlap: bool = False,
    extra_slots: int = 0,
) -> int:
    """Return the tokens of a window pool that is capped by what runs at once.

    Args:
        window, page_size: of the pool.
        requests: that run at once.
        chunk: tokens of a prefill chunk; None where decode alone runs.
        interval: decode steps between two evictions.
        spec: (steps, topk, draft tokens) of speculation.
        overlap: whether the next step is prepared while one runs.
        extra_slots: requests whose windows arrive from a prefill server.
    """
    drafted = 1 if spec is None else spec[2]
    decode = page_size
    if spec is not None:
        decode = alloc_length(*spec, page_size) * (2 if overlap else 1)
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
