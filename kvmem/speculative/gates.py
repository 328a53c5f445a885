"""Gates: rows of a rule set, each of which judges one pairing of facts.

A rule set is a tuple of rows. A row says to which plans it applies, which of those it
allows, and in words what is wrong with the others and what would work. The law: every
row is asked and all violations come back together, so that a plan is mended in one
round; a rule set that passes over a fact in silence says so in a row.

    Gate(
        "chain on a unified pool",
        applies=lambda plan: plan.pool_kind == "unified",
        allows=lambda plan: plan.is_linear,
        advice=lambda plan: Advice(f"topk = {plan.topk}", "...", "Use topk = 1"),
    )
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmem import errors
from kvmem.speculative.plan import SpecPlan

__all__ = ["Advice", "Gate", "Verdict", "Violation", "judge"]

Question = Callable[[SpecPlan], bool]


class Advice(NamedTuple):
    """The three beats of a violation."""

    asked: str
    law: str
    cure: str


class Gate(NamedTuple):
    """One row of a rule set.

    Args:
        name: of the row, unique in its rule set.
        applies: whether the row has anything to say about a plan.
        allows: whether a plan that it applies to keeps its law.
        advice: what is wrong with a plan that breaks it, and what would work.
        test: of kvmem's own rules, the test that would fail without the row.
    """

    name: str
    applies: Question
    allows: Question
    advice: Callable[[SpecPlan], Advice]
    test: str = ""


class Violation(NamedTuple):
    """A law of a rule set that a plan breaks; `str` is its message."""

    rules: str
    gate: str
    advice: Advice

    def __str__(self) -> str:
        asked, law, cure = self.advice
        return errors.say(f"{asked} (rules of {self.rules})", law, cure)


class Verdict(NamedTuple):
    """What one row says of a plan: "allowed", "refused" or "silent"."""

    gate: str
    said: str
    violation: Violation | None = None


def judge(plan: SpecPlan, gates: Sequence[Gate], rules: str) -> tuple[Verdict, ...]:
    """Return what every row of the rule set called `rules` says of a plan."""
    return tuple(_verdict(plan, gate, rules) for gate in gates)


def _verdict(plan: SpecPlan, gate: Gate, rules: str) -> Verdict:
    if not gate.applies(plan):
        return Verdict(gate.name, "silent")
    if gate.allows(plan):
        return Verdict(gate.name, "allowed")
    broken = Violation(rules, gate.name, gate.advice(plan))
    return Verdict(gate.name, "refused", broken)
