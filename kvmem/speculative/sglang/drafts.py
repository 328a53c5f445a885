"""SGLang's other rules of drafting, on static and unified pools alike.

One row a published check: widths and pages, lengths, parallelism, servers that do half
the work, caches beside them. That "trtllm_mha" verifies linear chains only is a rule of
the EAGLE family and has nothing to do with frozen-KV drafts, which run trees on it.
"""

from kvmem.speculative.gates import Gate
from kvmem.speculative.plan import SpecPlan
from kvmem.speculative.sglang import frozen, reserve
from kvmem.speculative.sglang.words import (
    ALGORITHMS,
    BLACKWELL_MLA,
    EAGLES,
    among,
    listed,
    row,
    target_backends,
)

__all__ = ["GATES"]

_TREES_ON_PAGES = {name: ("flashinfer", "fa3", "triton") for name in EAGLES}
_TREES_ON_PAGES |= {"ngram": ("flashinfer",)}
_AUX_WIDTH = 16  # entries of topk * steps that a prefill server sends
_BLOCK = 16  # tokens of a dflash block where none is given


def _runs(plan: SpecPlan) -> str | None:
    return frozen.promoted(plan).algorithm


def _is(*names: str):
    return lambda plan: _runs(plan) in names


def _headroom(plan: SpecPlan) -> int:
    steps, topk = plan.steps or 1, plan.width
    return reserve.row_headroom(
        steps, topk, plan.draft_tokens or steps * topk, plan.page_size
    )


_WIDTHS = (
    row(
        "known algorithm",
        applies=lambda plan: plan.algorithm is not None,
        allows=lambda plan: plan.algorithm in ALGORITHMS,
        asked=lambda plan: f"algorithm {plan.algorithm!r}",
        law=f"a server drafts by {listed(ALGORITHMS)}",
        cure="Use one of them",
    ),
    row(
        "trees on pages",
        applies=lambda plan: (
            _runs(plan) in _TREES_ON_PAGES
            and not plan.is_linear
            and plan.page_size > 1
            and bool(target_backends(plan))
        ),
        allows=lambda plan: among(target_backends(plan), _TREES_ON_PAGES[_runs(plan)]),
        asked=lambda plan: (
            f"{_runs(plan)} with topk = {plan.topk}, page_size = "
            f"{plan.page_size} on {listed(target_backends(plan))}"
        ),
        law="branches that share a page are read apart by some backends only",
        cure=lambda plan: (
            "Use topk = 1, page_size = 1, or one of "
            f"{listed(_TREES_ON_PAGES[_runs(plan)])}"
        ),
    ),
    row(
        "eagle: chains on trtllm_mha",
        applies=lambda plan: (
            _runs(plan) in EAGLES and "trtllm_mha" in target_backends(plan)
        ),
        allows=lambda plan: plan.is_linear,
        asked=lambda plan: f"{_runs(plan)} with topk = {plan.topk} on trtllm_mha",
        law="it verifies linear chains only",
        cure="Use topk = 1, or another backend of the target",
    ),
    row(
        "eagle: length of a chain",
        applies=lambda plan: (
            _runs(plan) in EAGLES
            and plan.is_linear
            and None not in (plan.steps, plan.draft_tokens)
        ),
        allows=lambda plan: plan.draft_tokens == plan.steps + 1,
        asked=lambda plan: (
            f"{_runs(plan)} with steps = {plan.steps}, draft_tokens = "
            f"{plan.draft_tokens}"
        ),
        law="a chain verifies the token before it and one a step",
        cure=lambda plan: f"Use draft_tokens = {plan.steps + 1}: a server takes it",
    ),
    row(
        "dspark: length of a chain",
        applies=lambda plan: _runs(plan) == "dspark" and plan.draft_tokens is not None,
        allows=lambda plan: plan.draft_tokens >= 2,
        asked=lambda plan: f"dspark with draft_tokens = {plan.draft_tokens}",
        law="it verifies the token before the draft and at least one of it",
        cure="Use draft_tokens >= 2",
    ),
    row(
        "width of a request's row",
        applies=lambda plan: (
            plan.algorithm is not None and plan.server.row_width is not None
        ),
        allows=lambda plan: plan.server.row_width >= _headroom(plan),
        asked=lambda plan: (
            f"rows {plan.server.row_width} tokens wider than the "
            f"context, with {_headroom(plan)} reserved behind it"
        ),
        law="what is reserved beyond a row is written into the next request's",
        cure=lambda plan: (
            f"Use rows at least {_headroom(plan)} tokens wider, "
            "a smaller topk, or smaller pages"
        ),
    ),
)
_DFLASH = (
    row(
        "dflash: no dp attention",
        applies=_is("dflash"),
        allows=lambda plan: plan.server.dp == 1,
        asked=lambda plan: f"dflash with DP attention {plan.server.dp}",
        law="its draft is not divided by data-parallel ranks",
        cure="Use DP attention 1",
    ),
    row(
        "dflash: one stage",
        applies=_is("dflash"),
        allows=lambda plan: plan.server.pp == 1,
        asked=lambda plan: f"dflash with {plan.server.pp} pipeline stages",
        law="its draft reads features of every layer",
        cure="Use one stage",
    ),
    row(
        "dflash: one step",
        applies=_is("dflash"),
        allows=lambda plan: plan.steps in (None, 1) and plan.is_linear,
        asked=lambda plan: f"dflash with steps = {plan.steps}, topk = {plan.topk}",
        law="a block is proposed in one step, a token a place",
        cure="Use steps = 1 and topk = 1",
    ),
    row(
        "dflash: window over the block",
        applies=lambda plan: (
            _runs(plan) == "dflash" and plan.server.draft_window is not None
        ),
        allows=lambda plan: plan.server.draft_window >= (plan.server.block or _BLOCK),
        asked=lambda plan: (
            f"a dflash draft with a window of "
            f"{plan.server.draft_window} and blocks of {plan.server.block or _BLOCK}"
        ),
        law="a block sees itself whole",
        cure=lambda plan: (
            f"Use blocks of at most {plan.server.draft_window}, or a longer window"
        ),
    ),
    row(
        "dflash: trtllm_mha drafts",
        applies=lambda plan: (
            _runs(plan) == "dflash" and plan.backends.of_draft == "trtllm_mha"
        ),
        allows=lambda plan: plan.server.draft_all_windows or plan.server.draft_causal,
        asked="a dflash draft that is neither causal nor all windows on trtllm_mha",
        law="it masks causally, or by a window in every layer",
        cure="Use another draft backend",
    ),
)
_DSPARK = (
    row(
        "dspark: one stage",
        applies=_is("dspark"),
        allows=lambda plan: plan.server.pp == 1,
        asked=lambda plan: f"dspark with {plan.server.pp} pipeline stages",
        law="its draft reads the last layer's features",
        cure="Use one stage",
    ),
    row(
        "dspark: dp attention",
        applies=lambda plan: _runs(plan) == "dspark" and plan.server.dp > 1,
        allows=lambda plan: (
            plan.server.dp_lm_head and plan.server.a2a is None and plan.server.cp == 1
        ),
        asked=lambda plan: (
            f"dspark with DP attention {plan.server.dp}, dp_lm_head = "
            f"{plan.server.dp_lm_head}, a2a = {plan.server.a2a}, CP {plan.server.cp}"
        ),
        law="under DP attention its head is data-parallel too, experts exchange "
        "nothing and contexts are not divided",
        cure="Set dp_lm_head, no a2a and CP 1, or DP attention 1",
    ),
)
_SERVERS = (
    row(
        "no dp attention",
        applies=_is("standalone", "ngram"),
        allows=lambda plan: plan.server.dp == 1,
        asked=lambda plan: f"{_runs(plan)} with DP attention {plan.server.dp}",
        law="its batches are not divided by data-parallel ranks",
        cure="Use DP attention 1",
    ),
    row(
        "prefixes of a decode server",
        applies=lambda plan: (
            plan.server.role == "decode" and plan.algorithm is not None
        ),
        allows=lambda plan: not plan.server.radix,
        asked=lambda plan: f"{_runs(plan)} on a decode server that keeps prefixes",
        law="what a draft needs of a prefix is not kept with it",
        cure="Turn the radix cache off, or draft nothing",
    ),
    row(
        "drafts sent to a decode server",
        applies=lambda plan: (
            plan.server.role is not None and plan.algorithm is not None
        ),
        allows=lambda plan: plan.width * (plan.steps or 1) <= _AUX_WIDTH,
        asked=lambda plan: (
            f"topk * steps = {plan.width * (plan.steps or 1)} between servers"
        ),
        law=f"{_AUX_WIDTH} entries are sent, unchecked: more are misread",
        cure="Use a smaller topk, or fewer steps",
    ),
    row(
        "host cache over token shards",
        applies=lambda plan: plan.server.host_cache is not None and plan.dcp > 1,
        allows=lambda plan: (
            plan.server.is_latent
            and not plan.server.storage
            and plan.algorithm in (None, "dspark")
        ),
        asked=lambda plan: (
            f"{plan.server.host_cache} with DCP {plan.dcp}, "
            f"{'latents' if plan.server.is_latent else 'heads'}, "
            f"{'with' if plan.server.storage else 'no'} storage, draft {plan.algorithm}"
        ),
        law="widened pages of latents alone have host copies, on two levels, with "
        "dspark or no draft",
        cure="Use DCP 1, or no host cache",
    ),
)
_DEVICES = (
    row(
        "mla kernels of Blackwell",
        applies=lambda plan: (
            plan.server.arch is not None
            and any(name in BLACKWELL_MLA for name in plan.backends.by_role.values())
        ),
        allows=lambda plan: plan.server.arch.startswith("sm1"),
        asked=lambda plan: (
            f"{listed(plan.backends.by_role.values())} on {plan.server.arch}"
        ),
        law=f"{listed(BLACKWELL_MLA)} are built for Blackwell",
        cure="Use flashmla, flashinfer or triton",
    ),
    row(
        "tokenspeed_mla: fp8",
        applies=lambda plan: "tokenspeed_mla" in plan.backends.by_role.values(),
        allows=lambda plan: plan.server.kv_dtype == "float8_e4m3fn",
        asked=lambda plan: f"tokenspeed_mla with a cache in {plan.server.kv_dtype}",
        law="it reads fp8 rows",
        cure="Use kv_dtype float8_e4m3fn",
    ),
    row(
        "cutedsl_mla: decode",
        applies=lambda plan: plan.backends.prefill is not None,
        allows=lambda plan: plan.backends.prefill != "cutedsl_mla",
        asked="prefill by cutedsl_mla",
        law="it decodes only; as the target's backend, prefill becomes trtllm_mla",
        cure="Use prefill by trtllm_mla",
    ),
)

GATES: tuple[Gate, ...] = (*_WIDTHS, *_DFLASH, *_DSPARK, *_SERVERS, *_DEVICES)
