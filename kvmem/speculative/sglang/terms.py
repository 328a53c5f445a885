"""What SGLang charges for a draft, and what it builds: two formulas in its case.

Kept as they are, so that a plan can show what they would do. Two are known to be wrong
in general: the layer ratio prices a draft as if it had the target's layers (#34234),
and it prices a frozen draft, which owns nothing; EAGLE's term does not grow with token
shards (#33912). kvmem's own is `kvmem.speculative.draft_term`, one for both.

    draft_cell(heads=8, head_dim=128, layers=5)           # 20,480 B a token
    layer_ratio_cell(65_536, layers=32, draft_layers=5)   # 75,776, target included
"""

from kvmem import errors
from kvmem.speculative.plan import SpecPlan
from kvmem.speculative.sglang.words import EAGLES

__all__ = [
    "attention_ranks",
    "draft_cell",
    "draft_pool_rows",
    "draft_pool_shape",
    "layer_ratio_cell",
    "local_heads",
    "replicated_rows",
    "token_cell",
]

_DUMMY_ROWS = 64  # of a frozen draft's pool, which nothing reads
_BLOCKS = ("dflash", "dspark")


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


def token_cell(
    plan: SpecPlan,
    target_nbytes: int,
    *,
    layers: int,
    draft_layers: int,
    draft_nbytes: int | None = None,
) -> int:
    """Return the bytes a target row that a server's budget charges, by algorithm.

    Args:
        plan: says who drafts, and over how many token shards.
        target_nbytes: of the target's row.
        layers, draft_layers: of target and draft.
        draft_nbytes: of the draft's row by its own geometry; None: not known, and the
            ratio of layers serves.
    """
    shares = {"layers": layers, "draft_layers": draft_layers}
    if plan.model_kind == "compressed" and plan.algorithm is not None:
        return target_nbytes * (layers + 1) // layers
    if plan.algorithm in (*EAGLES, "frozen_kv_mtp"):
        return layer_ratio_cell(target_nbytes, **shares)
    if plan.algorithm in _BLOCKS and draft_nbytes is None:
        return layer_ratio_cell(target_nbytes, **shares, dcp=plan.dcp)
    if plan.algorithm in _BLOCKS:
        return target_nbytes + draft_nbytes * plan.dcp
    return target_nbytes


def draft_pool_rows(plan: SpecPlan, rows: int) -> int:
    """Return the rows of a draft's physical pool beside `rows` of the target's."""
    if plan.algorithm in _BLOCKS:
        return replicated_rows(rows, plan.dcp)
    if plan.algorithm == "frozen_kv_mtp":
        return _DUMMY_ROWS
    return rows if plan.algorithm in EAGLES else 0


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


def attention_ranks(tp: int, dp: int = 1, cp: int = 1) -> int:
    """Return the ranks that divide attention heads: TP without data-parallel ranks.

    Dividing by all of TP charges too few bytes under DP attention (#38202, #39225).
    """
    return tp // (dp * cp)


def local_heads(total: int, attention_tp: int, dcp: int = 1) -> int:
    """Return the KV heads of a rank; ranks of one DCP group hold the same ones."""
    return max(1, total // max(1, attention_tp // dcp))


def draft_pool_shape(
    tokens: int, page_size: int, *, heads: int, head_dim: int, tp: int, dcp: int = 1
) -> tuple[int, int, int]:
    """Return (rows, heads, elements) of a draft's key tensor, and of its values.

    `tp` divides the heads of the draft, context parallel ranks among them; one page
    more than the tokens is the sink of padding.
    """
    return (tokens + page_size) * dcp, max(1, heads // tp), head_dim
