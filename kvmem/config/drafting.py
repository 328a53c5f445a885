"""From the table [speculative] to the draft that an engine starts.

The law: what is drafted is what was planned. The draft's layers, their groups and the
bytes of a pool of its own are those that the budget was asked about; and what is
planned but not run is refused before a weight is read.

    layers = drafting.layers_of(asked, model_config, spec, draft_config)
    draft = drafting.draft_of(plan, asked, model, ...)
"""

import dataclasses
from collections.abc import Sequence

from kvmem import geometry, serve
from kvmem.config.model import ModelConfig
from kvmem.config.speculative import OWN_LAYERS, SpeculativeConfig
from kvmem.geometry import LayerSpec, LifecycleGroup, Topology
from kvmem.model import dflash, draft_layers, draft_spec, mtp
from kvmem.model.cache_facts import CacheSpec
from kvmem.model.draft_spec import DraftSpec
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.partitions import AnySpec, partition_of
from kvmem.speculative import SpecPlan

__all__ = ["draft_of", "layers_of", "own_weight_nbytes", "unserved"]


READ_ROWS_BEFORE = ("mtp", "dspark")  # each token's row is that of the one before it


def layers_of(
    asked: SpeculativeConfig,
    model: ModelConfig,
    spec: AnySpec | CacheSpec,
    draft: ModelConfig | None,
) -> tuple[LayerSpec, ...]:
    """Return what the layers of a draft keep of a token, () where nothing.

    Layers of its own behind a hybrid that runs are those that would run behind it.

    Args:
        asked: the table.
        model: the target's table.
        spec: the target's facts.
        draft: the draft model's table.

    Raises:
        ConfigError: as of `SpeculativeConfig.draft_layers`.
    """
    drafts = None if draft is None else draft.layer_specs()
    planned = asked.draft_layers(model.layer_specs(spec), drafts)
    if asked.algorithm not in OWN_LAYERS or not isinstance(spec, HybridSpec):
        return planned
    return model.layer_specs(draft_spec.spec_of(DraftSpec, spec, len(planned)))


def own_weight_nbytes(
    asked: SpeculativeConfig,
    model: ModelConfig,
    spec: AnySpec,
    draft: ModelConfig | None,
    topology: Topology,
) -> int | None:
    """Return the bytes of a draft's own weights on a rank; None where not known.

    What is its target's (embeddings, norm, head, the first layers of a cut) is on the
    device once, and is not its own.

    Args:
        asked: the table.
        model: the target's table.
        spec: the target's facts.
        draft: the draft model's table.
        topology: the ranks; token shards hold the same weights.
    """
    heads = Topology(tp=topology.tp)
    if draft is not None:
        facts = draft.spec()
        if isinstance(facts, CacheSpec):
            return None
        item = geometry.np_dtype(draft.weight_dtype()).itemsize
        return partition_of(facts, heads).num_elements * item
    if asked.algorithm not in OWN_LAYERS:
        return 0
    kind = dflash if asked.algorithm == "dflash" else mtp
    own = kind.spec_of(spec, asked.num_layers(0))
    words = () if asked.weights is None else draft_layers.words_of(asked.weights)
    own = dataclasses.replace(own, words=words)
    item = geometry.np_dtype(model.weight_dtype()).itemsize
    return partition_of(own, heads).num_own_elements * item


def unserved(
    plan: SpecPlan,
    draft: ModelConfig | None,
    groups: Sequence[LifecycleGroup],
    stored: Sequence[LifecycleGroup],
) -> list[tuple[str, str, str]]:
    """Return what is asked for that is planned and not run: asked, law, cure.

    Args:
        plan: of the engine.
        draft: the draft model's table.
        groups: the target's.
        stored: the draft's groups, where records are kept beside the pool; else ().
    """
    faults = []
    kinds = {group.lifecycle.kind for group in groups}
    if plan.algorithm in OWN_LAYERS and "full" not in kinds:
        what = f'speculative.algorithm = "{plan.algorithm}"'
        law = "draft layers go with pages of full attention, and this target has none"
        faults.append((what, law, "draft with ngram"))
    if plan.algorithm in READ_ROWS_BEFORE and stored and kinds != {"full"}:
        what = f"a store beside {plan.algorithm} behind " + ", ".join(
            group.name for group in groups
        )
        law = (
            "the last token of a stored text is computed again for its hidden row, and "
            "windows and states have passed it"
        )
        faults.append((what, law, "leave the store out, or draft with dflash"))
    if any(group.lifecycle.kind != "full" for group in stored):
        what = "a store beside a draft of " + ", ".join(g.name for g in stored)
        law = (
            "a text comes back with all that its draft keeps of it, and windows and "
            "states of a draft have passed the places where it may end"
        )
        faults.append((what, law, "leave the store out, or draft with ngram"))
    if draft is not None and plan.algorithm is None:
        what = f"draft.source = {draft.source!r}"
        law = "a draft model proposes by an algorithm"
        cure = 'set speculative.algorithm to "two_engine", or leave [draft] out'
        faults.append((what, law, cure))
    return faults


def draft_of(
    plan: SpecPlan,
    asked: SpeculativeConfig,
    draft: ModelConfig | None,
    model: LoadedModel,
    **facts: object,
):
    """Return the draft of a plan; None where nobody drafts.

    Args:
        plan: of the engine; it breaks no rule.
        asked: the table.
        draft: the draft model's table.
        model: the target, loaded.
        facts: groups, solved and order, as of `kvmem.serve.draft.make.draft_of`.
    """
    if plan.algorithm is None:
        return None
    return serve.draft_of(
        plan,
        model,
        layers=asked.layers,
        matches=asked.matches,
        small=None if draft is None else draft.load(),
        seed=asked.seed or 0,
        weights=asked.weights,
        acceptance=asked.acceptance or "coupled",
        **facts,
    )
