"""What SGLang's unified memory goes together with: one buffer shared by bytes.

Each row is a line of its published checks (#33974, #33362, #36890, #37693, #39477): the
model, the draft, the kernels, the caches beside it, and decode context parallelism.
"""

from kvmem.speculative.gates import Gate
from kvmem.speculative.plan import SpecPlan
from kvmem.speculative.sglang.words import (
    AUDITED,
    BLACKWELL_MLA,
    among,
    listed,
    row,
    target_backends,
)

__all__ = ["GATES"]

_MHA = ("triton", "fa3", "fa4", "flashinfer", "trtllm_mha")
_LATENT_LINEAR = ("cutedsl", "helion")
_DCP = ("flashinfer", *BLACKWELL_MLA)


def _is_unified(plan: SpecPlan) -> bool:
    return plan.pool_kind == "unified"


def _linear(plan: SpecPlan, *names: str) -> tuple[str, ...]:
    """Return the allowed linear kernels: more of them over latents."""
    return (*names, *_LATENT_LINEAR) if plan.server.is_latent else names


def _decodes(plan: SpecPlan) -> tuple[str, ...]:
    return _linear(plan, "triton", "flashinfer")


def _prefills(plan: SpecPlan) -> tuple[str, ...]:
    return _linear(plan, "triton", "flashkda")


def _plain_backends(plan: SpecPlan) -> tuple[str, ...]:
    return AUDITED if plan.server.is_latent else _MHA


def _handed_over(plan: SpecPlan) -> bool:
    return _is_unified(plan) and plan.server.role is not None


def _sharded(plan: SpecPlan) -> bool:
    return _is_unified(plan) and plan.dcp > 1


_MODEL = (
    row(
        "unified: hybrid models",
        applies=_is_unified,
        allows=lambda plan: plan.model_kind != "dense",
        asked="unified memory for a model of full attention alone",
        law="it takes the place of hybrid pools only",
        cure="Use static pools (split)",
    ),
    row(
        "unified: no compressed rows",
        applies=_is_unified,
        allows=lambda plan: plan.model_kind != "compressed",
        asked="unified memory for compressed attention",
        law="its rows have pools of their own",
        cure="Use static pools (split)",
    ),
    row(
        "unified: no latents with windows",
        applies=lambda plan: _is_unified(plan) and plan.server.is_latent,
        allows=lambda plan: not plan.has_windows,
        asked="unified memory for latents and sliding windows",
        law="the two are not laid out together",
        cure="Use static pools (split)",
    ),
    row(
        "unified: keys as wide as values",
        applies=lambda plan: _is_unified(plan) and not plan.server.is_latent,
        allows=lambda plan: plan.server.equal_dims,
        asked="unified memory with head_dim other than v_head_dim",
        law="rows of keys and of values are one size",
        cure="Use static pools (split)",
    ),
)
_DRAFT = (
    row(
        "unified: drafts",
        applies=_is_unified,
        allows=lambda plan: plan.algorithm in (None, "dspark"),
        asked=lambda plan: f"unified memory with {plan.algorithm!r}",
        law="where a draft writes was audited for dspark alone",
        cure="Use dspark, no draft, or static pools (split)",
    ),
    row(
        "unified: dspark on states",
        applies=lambda plan: _is_unified(plan) and plan.algorithm == "dspark",
        allows=lambda plan: plan.model_kind == "state",
        asked=lambda plan: f"unified memory with dspark, model {plan.model_kind!r}",
        law="a draft that indexes virtual ids is sized beside recurrent layers only",
        cure="Use static pools (split), or no draft",
    ),
    row(
        "unified: linear chain",
        applies=_is_unified,
        allows=lambda plan: plan.is_linear,
        asked=lambda plan: f"unified memory with topk = {plan.topk}",
        law="a tree relocates single tokens, and the mover moves whole pages",
        cure="Use topk = 1, or static pools (split)",
    ),
)
_KERNELS = (
    row(
        "unified: dspark target backends",
        applies=lambda plan: (
            _is_unified(plan)
            and plan.algorithm == "dspark"
            and bool(target_backends(plan))
        ),
        allows=lambda plan: among(target_backends(plan), AUDITED),
        asked=lambda plan: f"dspark with {listed(target_backends(plan))}",
        law="verification may run on the prefill or on the decode backend",
        cure=f"Use one of {listed(AUDITED)} for both",
    ),
    row(
        "unified: dspark draft backend",
        applies=lambda plan: (
            _is_unified(plan)
            and plan.algorithm == "dspark"
            and plan.backends.of_draft is not None
        ),
        allows=lambda plan: plan.backends.of_draft in AUDITED,
        asked=lambda plan: f"dspark with the draft on {plan.backends.of_draft}",
        law="the draft's backend is reached on its own; unset it is the decode one",
        cure=f"Use one of {listed(AUDITED)}",
    ),
    row(
        "unified: backends without a draft",
        applies=lambda plan: (
            _is_unified(plan) and plan.algorithm is None and bool(target_backends(plan))
        ),
        allows=lambda plan: among(target_backends(plan), _plain_backends(plan)),
        asked=lambda plan: f"unified memory with {listed(target_backends(plan))}",
        law="pages of the shared buffer are read by the audited kernels",
        cure=lambda plan: f"Use one of {listed(_plain_backends(plan))}",
    ),
    row(
        "unified: linear decode",
        applies=lambda plan: (
            _is_unified(plan) and plan.backends.linear_decode is not None
        ),
        allows=lambda plan: plan.backends.linear_decode in _decodes(plan),
        asked=lambda plan: f"linear decode by {plan.backends.linear_decode}",
        law="strides of the shared buffer were audited for some",
        cure=lambda plan: f"Use one of {listed(_decodes(plan))}",
    ),
    row(
        "unified: linear prefill",
        applies=lambda plan: (
            _is_unified(plan) and plan.backends.linear_prefill is not None
        ),
        allows=lambda plan: plan.backends.linear_prefill in _prefills(plan),
        asked=lambda plan: f"linear prefill by {plan.backends.linear_prefill}",
        law="strides of the shared buffer were audited for some",
        cure=lambda plan: f"Use one of {listed(_prefills(plan))}",
    ),
    row(
        "unified: kernels of states",
        applies=lambda plan: _is_unified(plan) and plan.backends.states is not None,
        allows=lambda plan: plan.backends.states == "triton",
        asked=lambda plan: f"states by {plan.backends.states}",
        law="states of the shared buffer are read by triton",
        cure="Use triton",
    ),
    row(
        "unified: no ring of states",
        applies=_is_unified,
        allows=lambda plan: not plan.server.ring_states,
        asked="unified memory with replayed states",
        law="their ring is no part of the shared buffer",
        cure="Use static pools (split), or no ring",
    ),
    row(
        "unified: prefill graph",
        applies=_is_unified,
        allows=lambda plan: plan.server.prefill_graph != "on",
        asked="unified memory with a prefill graph asked for",
        law="a graph does not capture that locations are bound anew; by default it is "
        "turned off, with a warning",
        cure='Leave prefill_graph at "default", or turn it "off"',
    ),
)
_BESIDE = (
    row(
        "unified: no host cache",
        applies=_is_unified,
        allows=lambda plan: plan.server.host_cache is None,
        asked=lambda plan: f"unified memory with {plan.server.host_cache}",
        law="it has no pools in host memory",
        cure="Use static pools (split), or no host cache",
    ),
    row(
        "unified: transfer",
        applies=_handed_over,
        allows=lambda plan: plan.server.transfer == "mooncake",
        asked=lambda plan: f"unified memory sent by {plan.server.transfer}",
        law="whole pages are sent, which mooncake alone does",
        cure="Use mooncake",
    ),
    row(
        "unified: one stage",
        applies=_handed_over,
        allows=lambda plan: plan.server.pp == 1,
        asked=lambda plan: f"unified memory sent from {plan.server.pp} stages",
        law="a page holds every layer",
        cure="Use one pipeline stage",
    ),
    row(
        "unified: no sparse host copies",
        applies=_handed_over,
        allows=lambda plan: not plan.server.hisparse,
        asked="unified memory sent, with hisparse",
        law="index keys of the host are no part of a page",
        cure="Turn hisparse off",
    ),
    row(
        "unified: lazy compaction",
        applies=lambda plan: (
            _is_unified(plan)
            and (plan.server.role is not None or plan.server.host_cache is not None)
        ),
        allows=lambda plan: plan.server.compaction == "lazy",
        asked="eager compaction with transfers that hold pages",
        law="pages that a transfer reads are not moved, and eager compaction does not "
        "wait",
        cure="Use lazy compaction",
    ),
)
_SHARDS = (
    row(
        "unified dcp: latents",
        applies=_sharded,
        allows=lambda plan: plan.server.is_latent,
        asked=lambda plan: f"unified memory with DCP {plan.dcp} over heads",
        law="ids are widened for latents only",
        cure="Use DCP 1, or static pools (split)",
    ),
    row(
        "unified dcp: no windows",
        applies=_sharded,
        allows=lambda plan: not plan.has_windows,
        asked=lambda plan: f"unified memory with DCP {plan.dcp} and windows",
        law="ids of full attention alone are widened",
        cure="Use DCP 1, or static pools (split)",
    ),
    row(
        "unified dcp: one server",
        applies=_sharded,
        allows=lambda plan: plan.server.role is None,
        asked=lambda plan: (
            f"unified memory with DCP {plan.dcp}, role {plan.server.role!r}"
        ),
        law="widened pages are not sent",
        cure="Use DCP 1, or one server for both",
    ),
    row(
        "unified dcp: backends",
        applies=lambda plan: _sharded(plan) and bool(target_backends(plan)),
        allows=lambda plan: among(target_backends(plan), _DCP),
        asked=lambda plan: f"DCP {plan.dcp} with {listed(target_backends(plan))}",
        law="token shards are merged by some backends",
        cure=f"Use one of {listed(_DCP)}",
    ),
)

GATES: tuple[Gate, ...] = (*_MODEL, *_DRAFT, *_KERNELS, *_BESIDE, *_SHARDS)
