"""Gate: which models may be blended at all, and which were seen to do it well.

Two questions, in this order. `objections` asks the facts: what a model keeps of a text
must be rows that stand at places, and rows that are reused must be turnable. `judge`
asks what was measured: next tokens against those of a full recompute. The law: a model
that fails either is refused with the law that it breaks, and nothing is blended.

    objections(groups, BlendConfig())       # () or laws in words
    require(groups, topology, config)       # IncompatiblePlan names them all
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from kvmem import errors
from kvmem.blend.settings import BlendConfig
from kvmem.geometry import LayerSpec, LifecycleGroup, Topology, rerotate

__all__ = ["Verdict", "check_layer", "objections", "read", "require", "stale_layers"]
__all__ += ["require_passed"]


def objections(
    groups: Sequence[LifecycleGroup],
    config: BlendConfig,
    topology: Topology | None = None,
) -> tuple[str, ...]:
    """Return the laws that stand in the way of blending, in words; () where none.

    At ratio 1 every token is computed anew, so rows that cannot be turned do no harm.
    """
    found = []
    if topology is not None and topology.dcp > 1:
        law = f"a blended text lies whole on each rank, and dcp is {topology.dcp}"
        found.append(law)
    layers = [layer for group in groups for layer in group.layers]
    states = [layer.name for layer in layers if layer.kind == "state"]
    if states:
        found.append(
            f"recurrent layers ({_named(states)}) keep one state of all that came "
            "before, and no rows of a text that could be used elsewhere"
        )
    for group in groups:
        if group.lifecycle.kind == "window":
            found.append(
                f"group {group.name!r} keeps the tokens of a window only, and a text "
                "is reused as a whole"
            )
    if not config.recomputes_all:
        found += _unturned(layers, config)
    if check_layer(groups, config) is None and not states:
        found.append(
            f"blend.check_layer = {config.check_layer}, and no layer from there on "
            "keeps keys of its own"
        )
    return tuple(found)


def stale_layers(groups: Sequence[LifecycleGroup]) -> tuple[str, ...]:
    """Return the index layers whose keys would keep their old places."""
    return tuple(
        layer.name
        for group in groups
        for layer in group.layers
        if layer.kind == "indexer" and rerotate.obstacle(layer) is not None
    )


def check_layer(
    groups: Sequence[LifecycleGroup], config: BlendConfig
) -> LayerSpec | None:
    """Return the layer whose keys are compared: the first from `check_layer` on that
    keeps keys or a latent of its own; None without any."""
    layers = sorted(
        (layer for group in groups for layer in group.layers),
        key=lambda layer: layer.index,
    )
    for layer in layers:
        keeps = layer.kind in ("gqa", "mla") and layer.shares is None
        if keeps and layer.index >= config.check_layer:
            return layer
    return None


def require(
    groups: Sequence[LifecycleGroup], topology: Topology, config: BlendConfig
) -> None:
    """Refuse a model that cannot be blended.

    Raises:
        IncompatiblePlan: every law that it breaks.
    """
    broken = objections(groups, config, topology)
    if broken:
        raise errors.IncompatiblePlan(
            errors.say(
                "blending this model",
                "; ".join(broken),
                "Leave [blend] out: its texts are computed at each place anew",
            )
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check measured, of which model and with which settings.

    `agreement` is the share of next tokens that a full recompute gives too, `kl` the
    mean divergence (nats) of its distribution from the blended one. `speedup` is
    seconds to the first token of a full recompute over those of a blended text.
    """

    model_id: str
    kv_dtype: str
    ratio: float
    check_layer: int
    stale_selector: tuple[str, ...]  # index layers that kept old places
    num_texts: int
    num_tokens: int  # next tokens that were compared
    agreement: float
    first_agreement: float  # of the first one after each text
    kl: float
    blended_s: float
    recomputed_s: float

    @property
    def speedup(self) -> float:
        """How many times sooner the first token of a blended text comes."""
        return self.recomputed_s / self.blended_s

    def objections(self, config: BlendConfig) -> tuple[str, ...]:
        """Return why this does not pass, in words; () where it does."""
        found = []
        if not self.agreement >= config.min_agreement:  # what is no number is below
            found.append(
                f"{self.agreement:.3f} of the next tokens agree, and "
                f"blend.min_agreement is {config.min_agreement}"
            )
        if not self.kl <= config.max_kl:
            found.append(
                f"the mean divergence is {self.kl:.4f} nats, and blend.max_kl is "
                f"{config.max_kl}"
            )
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return what `read` reads."""
        return dataclasses.asdict(self) | {"speedup": round(self.speedup, 3)}


def read(path: str | pathlib.Path) -> Verdict:
    """Read the record of a check.

    Raises:
        ConfigError: no such file, or not such a record.
    """
    names = {field.name for field in dataclasses.fields(Verdict)}
    try:
        found = json.loads(pathlib.Path(path).read_text())
        facts = {name: value for name, value in found.items() if name in names}
        facts["stale_selector"] = tuple(facts["stale_selector"])
        wrong = [n for n in _FIGURES if not _is_figure(facts[n])]
        if wrong:
            raise TypeError(f"{', '.join(wrong)}: no figure")
        return Verdict(**facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.ConfigError(
            errors.say(
                f"blend.gate = {str(path)!r}",
                f"it is the record of a check ({type(error).__name__}: {error})",
                "Make one with `kvmem blend check CONFIG --out PATH`",
            )
        ) from None


def require_passed(config: BlendConfig, model_id: str | None, kv_dtype: str) -> Verdict:
    """Return the record of the check that this model passed with these settings.

    Args:
        config: names the record.
        model_id: None where the weights have not been read yet.
        kv_dtype: of the cache.

    Raises:
        IncompatiblePlan: no record is named, it is of another model or other settings,
            or what it measured is below the limits; all of it at once.
        ConfigError: the file is no such record.
    """
    cure = "Run `kvmem blend check CONFIG --out PATH` and set blend.gate to PATH"
    if config.gate is None:
        law = "a model passes a check before its texts are blended, and none is named"
        raise errors.IncompatiblePlan(errors.say("blending without a gate", law, cure))
    found = read(config.gate)
    asked = {"model_id": model_id, "kv_dtype": kv_dtype, "ratio": config.ratio}
    asked["check_layer"] = config.check_layer
    broken = [
        f"it is of {name} {_short(getattr(found, name))}, and this is {_short(value)}"
        for name, value in asked.items()
        if value is not None and getattr(found, name) != value
    ]
    broken += found.objections(config)
    if broken:
        asked_of = f"blending by the gate {config.gate!r}"
        raise errors.IncompatiblePlan(errors.say(asked_of, "; ".join(broken), cure))
    return found


_FIGURES = ("ratio", "check_layer", "num_texts", "num_tokens", "agreement")
_FIGURES += ("first_agreement", "kl", "blended_s", "recomputed_s")


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unturned(layers: Sequence[LayerSpec], config: BlendConfig) -> list[str]:
    """Return one law for each reason why rows cannot be turned, its layers named."""
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.kind == "state":
            continue
        if layer.kind == "indexer" and config.allow_stale_selector:
            continue
        reason = rerotate.obstacle(layer)
        if reason is not None:
            reasons.setdefault(reason, []).append(layer.name)
    found = []
    for reason, names in reasons.items():
        law = f"keys of {_named(names)} cannot be turned to another place: {reason}"
        if any(layer.name in names and layer.kind == "indexer" for layer in layers):
            law += " (blend.allow_stale_selector or blend.ratio = 1 allow it)"
        found.append(law)
    return found


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 16 else text
