"""Selection: which manager serves, and why, from what was asked and what would break.

The law: what a person wrote and what follows from a default are told apart. Where a
choice would break the plan, an explicit one is refused with the reason and the cure,
and a default gives way with the reason; nothing is changed in silence.

    select(None, "grouped", Plan())                  # grouped: the model prefers it
    select(None, "grouped", Plan(engines="two"))     # static_split, a fallback
    select("grouped", None, Plan(engines="two"))     # IncompatiblePlan

Two engines that each size their manager from the whole budget take it twice. One
manager that holds the groups of both, with a domain each, is the cure: `joint=True`.

A rule set is a tuple of rules, asked in turn; the first that answers decides.
"tensorrt-llm" has the rows of that engine besides, for those who plan it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from kvmem import errors
from kvmem.geometry import LifecycleGroup
from kvmem.manage.grouped import NAME as GROUPED
from kvmem.manage.static_split import NAME as STATIC_SPLIT

__all__ = ["MANAGERS", "Plan", "Route", "Selection", "preference_of", "select"]

MANAGERS = (GROUPED, STATIC_SPLIT)
ENGINES = ("none", "one", "two")


class Route(NamedTuple):
    """How keys and values reach a decoding server from a prefilling one."""

    backend: str
    runtime: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a manager is chosen for.

    Args:
        model: class or name of the model, in messages.
        engines: of speculation: "none", "one" (target and draft in one engine), "two".
        joint: one manager holds the groups of target and draft.
        route: of disaggregated serving, read by "tensorrt-llm".
        has_states: recurrent layers, read by "tensorrt-llm".
        has_own_head_dims: layers of several head dims, read by "tensorrt-llm".
        has_extra_snapshots: states kept at further offsets, read by "tensorrt-llm".
    """

    model: str = "the model"
    engines: str = "none"
    joint: bool = False
    route: Route | None = None
    has_states: bool = False
    has_own_head_dims: bool = False
    has_extra_snapshots: bool = False

    def __post_init__(self):
        if self.engines not in ENGINES:
            raise errors.ConfigError(
                errors.say(
                    f"engines = {self.engines!r}",
                    "target and draft run in no, one or two engines of speculation",
                    f"Use one of {', '.join(ENGINES)}",
                )
            )


class Selection(NamedTuple):
    """The manager that serves.

    `provenance` is what a person wrote: "unset", "auto" or "explicit"; `is_fallback`
    says that the model prefers another one, which the plan does not bear.
    """

    name: str
    reason: str
    provenance: str
    is_fallback: bool = False


class _Ask(NamedTuple):
    requested: str | None
    preference: str | None
    plan: Plan

    @property
    def provenance(self) -> str:
        return {None: "unset", "auto": "auto"}.get(self.requested, "explicit")

    def answer(self, name: str, reason: str, is_fallback: bool = False) -> Selection:
        return Selection(name, reason, self.provenance, is_fallback)


_Rule = Callable[[_Ask], Selection | None]


def select(
    requested: str | bool | None,
    preference: str | bool | None,
    plan: Plan,
    rules: str = "kvmem",
) -> Selection:
    """Choose a manager.

    Args:
        requested: what a person wrote: a manager's name, True for "grouped", False for
            "static_split", or "auto"; None when nothing was. A default merged into the
            config must not be passed as if it had been written.
        preference: of the model's class: a manager's name, "auto" or None.
        plan: what it serves.
        rules: "kvmem" or "tensorrt-llm".

    Raises:
        ConfigError: a value outside those, or a fact that the rule set does not read.
        IncompatiblePlan: an explicit choice that the plan does not bear.
    """
    if rules not in _RULES:
        raise _refused(f"rules = {rules!r}", f"Use one of {', '.join(_RULES)}")
    _require_read(plan, rules)
    ask = _Ask(
        _spelled(requested, "manager"),
        _spelled(preference, f"the manager that {plan.model} prefers", is_given=False),
        plan,
    )
    for rule in _RULES[rules]:
        answer = rule(ask)
        if answer is not None:
            return answer
    raise AssertionError("the last rule answers every question")


def preference_of(*groups: LifecycleGroup) -> str | None:
    """Return what a model of these groups prefers: "grouped" if there are several."""
    return GROUPED if len(groups) > 1 else None


def _resolved_route(ask: _Ask) -> None:
    route = ask.plan.route
    if route is not None and "auto" in route:
        raise errors.ConfigError(
            errors.say(
                f"a manager for {route}",
                "the route decides which managers can serve it, so it comes first",
                "Resolve backend and runtime of the route, then select the manager",
            )
        )


def _own_head_dims(ask: _Ask) -> Selection | None:
    if not ask.plan.has_own_head_dims:
        return None
    return ask.answer(
        GROUPED,
        f"layers of {ask.plan.model} have head dims of their own, which only grouped "
        "pages hold, whatever was asked",
    )


def _extra_snapshots(ask: _Ask) -> None:
    if ask.requested == STATIC_SPLIT and ask.plan.has_extra_snapshots:
        raise errors.IncompatiblePlan(
            errors.say(
                f"manager = {STATIC_SPLIT!r} with snapshots at further offsets",
                "only grouped pages keep a state at any offset",
                f"Use {GROUPED!r} or 'auto', or no further snapshots",
            )
        )


def _asked_static(ask: _Ask) -> Selection | None:
    if ask.requested != STATIC_SPLIT:
        return None
    return ask.answer(STATIC_SPLIT, "it was asked for")


def _explicit_with_two_engines(ask: _Ask) -> None:
    if ask.requested == GROUPED and _claims_twice(ask.plan):
        raise errors.IncompatiblePlan(
            errors.say(
                f"manager = {GROUPED!r} with a draft in an engine of its own",
                "both managers would size their pools from the whole byte budget",
                "Hold both in one joint manager, whose groups carry the domain "
                f"'target' or 'draft' (joint=True), or use {STATIC_SPLIT!r} or "
                "'auto'",
            )
        )


def _explicit_states_on_route(ask: _Ask) -> None:
    explicit = ask.requested == GROUPED and ask.plan.has_states
    if explicit and _is_foreign(ask.plan.route):
        raise errors.IncompatiblePlan(
            errors.say(
                f"manager = {GROUPED!r} for the states of {ask.plan.model} over "
                f"{ask.plan.route}",
                "states in grouped pages are sent by NIXL from a python runtime only",
                "Use that route, or 'auto'",
            )
        )


def _asked_grouped(ask: _Ask) -> Selection | None:
    if ask.requested != GROUPED:
        return None
    return ask.answer(GROUPED, "it was asked for")


def _no_preference(ask: _Ask) -> Selection | None:
    if ask.preference == GROUPED:
        return None
    said = {
        None: f"{ask.plan.model} prefers none",
        "auto": f"{ask.plan.model} leaves it open",
    }.get(ask.preference, f"{ask.plan.model} prefers it")
    return ask.answer(STATIC_SPLIT, said)


def _two_engines(ask: _Ask) -> Selection | None:
    if not _claims_twice(ask.plan):
        return None
    return ask.answer(
        STATIC_SPLIT,
        f"{ask.plan.model} prefers {GROUPED}, but the draft runs in an engine of "
        "its own, and both managers would size their pools from the whole byte budget: "
        "one joint manager with a domain a group would serve both",
        is_fallback=True,
    )


def _foreign_route(ask: _Ask) -> Selection | None:
    if not _is_foreign(ask.plan.route):
        return None
    return ask.answer(
        STATIC_SPLIT,
        f"{ask.plan.model} prefers {GROUPED}, but {ask.plan.route} does not send "
        "grouped pages: NIXL from a python runtime does",
        is_fallback=True,
    )


def _preferred(ask: _Ask) -> Selection:
    return ask.answer(GROUPED, f"{ask.plan.model} prefers it")


_COMMON: tuple[_Rule, ...] = (_asked_static, _explicit_with_two_engines)
_RULES: dict[str, tuple[_Rule, ...]] = {
    "kvmem": (*_COMMON, _asked_grouped, _no_preference, _two_engines, _preferred),
    "tensorrt-llm": (
        _resolved_route,
        _own_head_dims,
        _extra_snapshots,
        *_COMMON,
        _explicit_states_on_route,
        _asked_grouped,
        _no_preference,
        _two_engines,
        _foreign_route,
        _preferred,
    ),
}
_ONLY_TENSORRT_LLM = (
    "route",
    "has_states",
    "has_own_head_dims",
    "has_extra_snapshots",
)


def _claims_twice(plan: Plan) -> bool:
    return plan.engines == "two" and not plan.joint


def _is_foreign(route: Route | None) -> bool:
    return route is not None and route != Route("NIXL", "PYTHON")


def _spelled(value: object, what: str, is_given: bool = True) -> str | None:
    """Return a choice by name, None as it is."""
    if is_given and isinstance(value, bool):
        return GROUPED if value else STATIC_SPLIT
    if value is None or (isinstance(value, str) and value in (*MANAGERS, "auto")):
        return value
    raise _refused(f"{what} = {value!r}", f"Use one of {', '.join(MANAGERS)}, auto")


def _refused(asked: str, cure: str) -> errors.ConfigError:
    return errors.ConfigError(
        errors.say(asked, "a choice is one of the known names", cure)
    )


def _require_read(plan: Plan, rules: str) -> None:
    """Refuse facts that a rule set would pass over in silence."""
    unread = [name for name in _ONLY_TENSORRT_LLM if getattr(plan, name)]
    if rules == "kvmem" and unread:
        raise errors.ConfigError(
            errors.say(
                f"a plan with {', '.join(unread)}",
                "the rules of kvmem do not read them: its pools hold any group, and "
                "records travel by any store",
                "Leave them out, or use rules='tensorrt-llm'",
            )
        )
