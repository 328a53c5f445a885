"""Rule sets: what the same store does by default, and what OpenViking does.

The law: a rule changes what is said or remembered, never whether acknowledged messages
stay. The log, the locks and the write order are the same under both.

    named("openviking").clock_from_log  # False: its clock is a counter in .meta.json
"""

import dataclasses

from kvmem.errors import ConfigError, say
from kvmem.session.views import PeerScope


@dataclasses.dataclass(frozen=True)
class Rules:
    """The differences between two session stores, one field each."""

    name: str
    clock_from_log: bool  # else the larger of .meta.json's total and the live messages
    keeps_window: bool  # a record remembers its cooldown, and is kept for its sake
    ledger_by_actor: bool  # else actors of one session cool each other's recalls
    sets_bad_ledger_aside: bool  # and says "reset"; else "new", and it is overwritten
    counts_idle_recalls: bool  # recalls move a clock that no message moves
    keeps_tombstones: bool  # a deleted session stays deleted until it is created
    peer_scope: PeerScope


KVMEM = Rules("kvmem", True, True, True, True, True, True, "actor")
OPENVIKING = Rules("openviking", False, False, False, False, False, False, "all")
_RULES = {rules.name: rules for rules in (KVMEM, OPENVIKING)}


def named(name: str) -> Rules:
    """Return the rules of a name, or raise ConfigError."""
    if name not in _RULES:
        law = f"the rule sets are {', '.join(_RULES)}"
        raise ConfigError(say(f"rules={name!r}", law, "Name one of them"))
    return _RULES[name]
