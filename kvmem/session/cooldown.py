"""Cooldowns: how long a memory that was served stays out of the next recalls.

The law: cooled(u) iff its record is readable, is more than a bare uri, is not ahead of
the clock, and is younger than the window of *this* recall. What is "resident" is cooled
exactly while its text lies in the live KV chain, whatever was recorded.

    principal.recall("tea?", session=s, cooldown=messages(3))
    principal.recall("tea?", session=s, cooldown=resident(chain.uris))

A session whose messages nobody captures has a clock that stands still. There recalls
count in place of messages and turns, so that nothing stays suppressed for ever. (A
window in tokens has no such count.)
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from kvmem.errors import ConfigError, say
from kvmem.session.ledger import Ledger, Record
from kvmem.session.lines import Clock

Unit = Literal["messages", "turns", "tokens", "resident"]
# Called with (session id, actor): the uris whose spans lie in that live KV chain.
LiveFn = Callable[[str, str | None], Collection[str]]
_HORIZON = 4  # a record is kept for so many windows


@dataclasses.dataclass(frozen=True)
class Cooldown:
    """A policy; made by `messages`, `turns`, `tokens` or `resident`."""

    unit: Unit
    n: int = 0
    live: LiveFn | None = None

    @property
    def is_off(self) -> bool:
        """Say whether nothing is ever cooled, so that no session is needed."""
        return self.unit != "resident" and self.n == 0


def messages(n: int) -> Cooldown:
    """Cool a memory until `n` messages were stored after it was served; 0: never."""
    return Cooldown("messages", _window(n, "messages"))


def turns(n: int) -> Cooldown:
    """Cool a memory until the user spoke `n` times after it was served."""
    return Cooldown("turns", _window(n, "turns"))


def tokens(n: int) -> Cooldown:
    """Cool a memory until about `n` tokens were stored after it was served."""
    return Cooldown("tokens", _window(n, "tokens"))


def resident(live: LiveFn) -> Cooldown:
    """Cool a memory exactly while it lies in the live KV chain.

    Args:
        live: called with (session id, actor), returns the uris in that chain.
    """
    if not callable(live):
        law = "it is a function of (session id, actor) that returns uris"
        raise ConfigError(say(f"resident({live!r})", law, "Pass the chain's own"))
    return Cooldown("resident", 0, live)


def cooled(
    policy: Cooldown, ledger: Ledger, session: str, actor: str | None, clock: Clock
) -> frozenset[str]:
    """Return the uris that a recall of this actor may not serve now."""
    if policy.unit == "resident":
        return frozenset(policy.live(session, actor))
    idle = ledger.idle(clock.messages)
    return frozenset(
        uri
        for uri, record in ledger.of(actor).items()
        if record.detail != "uri"
        and (age := _age(record, policy.unit, clock, idle)) is not None
        and age < policy.n
    )


def kept(
    policy: Cooldown, records: Mapping[str, Record], clock: Clock, keeps_window: bool
) -> list[str]:
    """Return the uris whose records some window may still ask for."""

    def is_within(record: Record, unit: str | None, n: int | None) -> bool:
        if unit == "resident":
            return True
        age = _age(record, unit or "messages", clock, 0)
        return age is not None and n is not None and age <= _HORIZON * n

    return [
        uri
        for uri, record in records.items()
        if record.turn <= clock.messages
        and (
            is_within(record, policy.unit, policy.n)
            or (keeps_window and is_within(record, record.unit, record.n))
        )
    ]


def _age(record: Record, unit: str, clock: Clock, idle: int) -> int | None:
    """Return how long ago a record was made; None if that is ahead of the clock."""
    if record.turn > clock.messages:
        return None
    then = {"turns": record.turns, "tokens": record.tokens}.get(unit)
    now = {"turns": clock.turns, "tokens": clock.tokens}.get(unit)
    if then is None or now is None:  # no such count was kept: messages stand for it
        then, now = record.turn, clock.messages
    passed = max(0, idle - record.idle) if record.turn == clock.messages else 0
    return now - then + (passed if unit != "tokens" else 0)


def _window(n: int, unit: str) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise ConfigError(
            say(f"{unit}({n!r})", f"a window is a number of {unit}", "Pass 0 or more")
        )
    return n
