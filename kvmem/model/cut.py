"""A cut: the first layers of a model, with its embeddings and its head.

An untrained draft that costs a part of its model: what the first layers know of the
next token, read by the model's own head. The law: its layers keep the very keys and
values that the model's first layers keep of the same text, for nothing of them is
changed or copied.

    draft = cut.first_layers(model, 10)
    draft.spec.layers         # 10
"""

import dataclasses

from kvmem import errors, settings
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.partitions import AnySpec

__all__ = ["first_layers", "num_layers", "spec_of_first"]


def first_layers(model: LoadedModel, layers: int) -> LoadedModel:
    """Return the model's first layers, its embeddings and head; arrays are shared.

    Raises:
        ConfigError: fewer layers than one, more than the model has, or layers that are
            others in a shorter model.
    """
    spec = spec_of_first(model.spec, layers)
    names = spec.parameters()
    return LoadedModel(
        spec,
        {name: model.params[name] for name in names},
        model.tokenizer,
        f"first {layers} layers of {model.source}",
    )


def num_layers(spec: AnySpec) -> int:
    """Return how many layers a model has."""
    return len(spec.mixers) if isinstance(spec, HybridSpec) else spec.layers


def spec_of_first(spec: AnySpec, layers: int) -> AnySpec:
    """Return the facts of a model's first layers."""
    whole = num_layers(spec)
    if not 1 <= layers <= whole:
        raise errors.ConfigError(
            errors.say(
                f"the first {layers} layers of {spec.name}",
                f"it has {whole}",
                f"Cut it to a number of layers from 1 to {whole}",
            )
        )
    name = f"{spec.name}[:{layers}]"
    if not isinstance(spec, HybridSpec):
        return dataclasses.replace(spec, name=name, layers=layers)
    facts = spec.facts.plain() | {"num_hidden_layers": layers}
    if facts.get("layer_types"):
        facts["layer_types"] = facts["layer_types"][:layers]
    # The last layers read what others keep; so many of those are left.
    shared = facts.pop("num_kv_shared_layers", 0) - (whole - layers)
    if shared > 0:
        facts["num_kv_shared_layers"] = shared
    made = HybridSpec(name, settings.Table(facts))
    if made.mixers != spec.mixers[:layers]:
        raise errors.ConfigError(
            errors.say(
                f"the first {layers} layers of {spec.name}",
                "which kind a layer is depends on how many there are",
                "Name every layer's kind in layer_types, or cut it elsewhere",
            )
        )
    return made
