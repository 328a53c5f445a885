"""Speculative decoding: plans of it, and which of them may run.

Facts only: who drafts, on which pools, at what cost. A plan is judged by a named rule
set: "kvmem" is what kvmem's engine obeys, "sglang" what a server of SGLang admits. The
law: every violation comes back at once,
in words, and nothing that a plan says is passed over.

    plan = SpecPlan("frozen_kv", topk=4)
    for violation in check(plan):
        print(violation)    # ... a unified pool serves a linear draft chain only ...
"""

from kvmem import errors
from kvmem.speculative import capacity, rules_kvmem, sglang
from kvmem.speculative.gates import Advice, Gate, Verdict, Violation, judge
from kvmem.speculative.plan import (
    MODEL_KINDS,
    POOL_KINDS,
    STEPS,
    Backends,
    Server,
    SpecPlan,
)
from kvmem.speculative.terms import (
    HOMES,
    DraftPool,
    Placed,
    draft_pool,
    draft_term,
    place,
)

__all__ = [
    "HOMES",
    "MODEL_KINDS",
    "POOL_KINDS",
    "RULES",
    "STEPS",
    "Advice",
    "Backends",
    "DraftPool",
    "Gate",
    "Placed",
    "Server",
    "SpecPlan",
    "Verdict",
    "Violation",
    "capacity",
    "check",
    "draft_pool",
    "draft_term",
    "place",
    "require",
    "sglang",
    "verdicts",
]

RULES: dict[str, tuple[Gate, ...]] = {
    rules_kvmem.NAME: rules_kvmem.GATES,
    sglang.NAME: sglang.GATES,
}


def check(plan: SpecPlan, rules: str = "kvmem") -> tuple[Violation, ...]:
    """Return every law of a rule set that the plan breaks, () where none.

    Raises:
        ConfigError: no such rule set.
    """
    return tuple(v.violation for v in verdicts(plan, rules) if v.violation is not None)


def verdicts(plan: SpecPlan, rules: str = "kvmem") -> tuple[Verdict, ...]:
    """Return what each row of a rule set says of the plan, in the rows' order.

    Raises:
        ConfigError: no such rule set.
    """
    if rules not in RULES:
        raise errors.ConfigError(
            errors.say(
                f"rules = {rules!r}",
                "a plan is judged by a rule set that has a name",
                f"Use one of {', '.join(RULES)}",
            )
        )
    return judge(plan, RULES[rules], rules)


def require(plan: SpecPlan, rules: str = "kvmem") -> None:
    """Refuse a plan that breaks a law.

    Raises:
        IncompatiblePlan: with every violation.
        ConfigError: no such rule set.
    """
    broken = check(plan, rules)
    if broken:
        raise errors.IncompatiblePlan("\n".join(str(each) for each in broken))
