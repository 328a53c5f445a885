"""Recall: memories for a query, without those that were served a moment ago.

The law: recall fails open and capture fails loud. Whatever is wrong with the session,
the memories that were found are returned, and `status` says what did not hold:

    off           no cooldown was asked for, or the session could not be made
    new, ok       there was no record of this actor yet; there was
    reset         the ledger was unreadable: set aside and begun anew
    write_failed  the memories are returned, and the next recall may repeat them
    unavailable   the session is damaged, deleted or busy
    replayed      the answer that this request id was given before

Order of effects: the session is made, its ledger and clock are read, the search runs
without any lock, and under the lock what was cooled meanwhile is dropped and the rest
recorded, last of all. What was not served is not recorded, and then nothing is written.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from kvmem.errors import ConfigError, Conflict, KVMemError, say
from kvmem.session import cooldown, ledger, materialise, state, tombstone, views
from kvmem.session.asking import Ask, Entry, Recall, SearchFn, Status, text_of
from kvmem.session.ledger import Ledger, Record, Request
from kvmem.session.place import LOG, Place
from kvmem.session.search import Hit, Retriever
from kvmem.session.state import State

_logger = logging.getLogger("kvmem.session")


def run(
    asked: Ask,
    place: Place | None,
    generation: int | None,
    search: SearchFn,
) -> Recall:
    """Answer a recall.

    Args:
        asked: what is asked.
        place: the session's; None for a recall without one.
        generation: of the session's handle.
        search: called with how many hits are wanted, outside any lock.

    Raises:
        Conflict: the request id was used for another query.
    """
    found, status, reason = _opened(asked, place, generation)
    before = _replay(asked, found)
    if before is not None:
        with contextlib.suppress(OSError):  # it is answered all the same
            state.settle_ledger(place, found)
        return before
    cooled = _cooled(asked, place, found)
    hits, num_errors, error = _searched(asked, search, len(cooled))
    fresh = [hit for hit in hits if hit.uri not in cooled]
    entries = _rendered(asked, fresh)
    answer = Recall(
        asked.id,
        entries,
        status,
        len(cooled),
        len(hits) - len(fresh),
        num_errors,
        found.clock.messages if found else None,
        reason or error,
        actor=asked.actor,
    )
    is_served = bool(entries) and asked.served(entries)
    if found is not None and (is_served or _stands_still(place, asked, found, cooled)):
        answer = _recorded(asked, place, generation, answer, is_served)
    elif is_served:
        answer = dataclasses.replace(
            answer, records=_json(_records(asked, None, place, entries))
        )
    text = text_of(answer.entries) if is_served else ""
    return dataclasses.replace(answer, rendered=text)


def _opened(
    asked: Ask, place: Place | None, generation: int | None
) -> tuple[State | None, Status, str | None]:
    """Make and read the session; whatever is wrong is a status."""
    if place is None or asked.policy.is_off:
        return None, "off", None
    try:
        tombstone.check(place, generation)
        if not place.io.is_file(place.file(LOG)):
            with place.locked():
                tombstone.check(place, generation)
                materialise.ensure(place)
    except OSError as error:
        return None, "off", f"the session could not be made: {error}"
    except KVMemError as error:
        return None, "unavailable", str(error)
    try:
        found = state.read(place)
        return found, found.status(_key(asked, place), place), None
    except (KVMemError, OSError) as error:
        return None, "unavailable", _why(place, generation, error)


def _why(place: Place, generation: int | None, error: Exception) -> str:
    """Return why a session cannot be read: it may have been deleted meanwhile."""
    try:
        tombstone.check(place, generation)
    except (KVMemError, OSError) as deleted:
        return str(deleted)
    return str(error)


def _key(asked: Ask, place: Place) -> str | None:
    """Return the actor as ledgers know it."""
    return asked.actor if place.rules.ledger_by_actor else None


def _cooled(asked: Ask, place: Place | None, found: State | None) -> frozenset[str]:
    """Return what is held back; nothing where a live chain cannot be asked."""
    if found is None:
        return frozenset()
    key, name = _key(asked, place), place.identity.session
    try:
        return cooldown.cooled(asked.policy, found.ledger, name, key, found.clock)
    except Exception as error:  # whatever the owner of a chain may raise
        if asked.policy.live is None:
            raise
        _logger.warning("recall: the live chain cannot be asked: %r", error)
        return frozenset()


def _replay(asked: Ask, found: State | None) -> Recall | None:
    """Return what this request was answered before, if it was."""
    before = found.ledger.requests.get(asked.id) if found and asked.is_named else None
    if before is None:
        return None
    if (before.query, before.actor) != (asked.query_digest, asked.actor):
        law = "it was answered for another query or another actor"
        raise Conflict(say(f"request id {asked.id!r}", law, "Use a new id a recall"))
    entries = tuple(Entry(**each) for each in before.entries)
    return Recall(
        asked.id,
        entries,
        "replayed",
        turn=before.turn,
        is_recorded=not before.pending,
        rendered=text_of(entries),
        actor=asked.actor,
        records=before.records,
    )


def _searched(
    asked: Ask, search: SearchFn, num_cooled: int
) -> tuple[list[Hit], int, str | None]:
    """Ask the retriever for enough to have `limit` left; it may fail."""
    try:
        hits = list(search(asked.limit + min(num_cooled, 2 * asked.limit)))
    except Exception as error:  # whatever a retriever of somebody else's may raise
        _logger.warning("recall: the retriever failed: %r", error)
        return [], 1, f"the retriever failed: {error!r}"
    return hits, 0, None


def _rendered(asked: Ask, hits: Sequence[Hit]) -> tuple[Entry, ...]:
    """Return the entries of the first hits that are rendered; of equal texts one."""
    entries, texts = [], set()
    for hit in hits:
        if len(entries) == asked.limit:
            break
        tier = asked.render(hit)
        if tier is None or (tier != "uri" and hit.text in texts):
            continue
        if tier not in ledger.DETAILS:
            law = f"a tier is one of {', '.join(ledger.DETAILS)}"
            raise ConfigError(say(f"render gave {tier!r}", law, "Return one, or None"))
        texts.add(hit.text)
        text = hit.uri if tier == "uri" else hit.text
        entries.append(Entry(hit.uri, tier, text, hit.score, hit.peer))
    return tuple(entries)


def _stands_still(
    place: Place, asked: Ask, found: State, cooled: frozenset[str]
) -> bool:
    """Say whether this recall counts because the clock stands where it served last."""
    records = found.ledger.of(_key(asked, place))
    return place.rules.counts_idle_recalls and any(
        uri in cooled and record.turn == found.clock.messages
        for uri, record in records.items()
    )


def _recorded(
    asked: Ask, place: Place, generation: int | None, answer: Recall, is_served: bool
) -> Recall:
    """Drop what was cooled meanwhile, record the rest, and say how it went."""
    try:
        with place.locked():
            tombstone.check(place, generation)
            found = state.read(place)
            place.settle(found.log)
            before = _replay(asked, found)
            if before is not None:  # a retry that overtook this call
                state.settle_ledger(place, found)
                return before
            cooled = _cooled(asked, place, found)
            entries = tuple(e for e in answer.entries if e.uri not in cooled)
            records = _records(asked, found, place, entries) if is_served else {}
            new = _noted(asked, place, found, entries, records)
            if new is not None:
                state.write_ledger(place, found, new)
    except (KVMemError, OSError) as error:
        if not is_served:
            return answer
        records = _json(_records(asked, None, place, answer.entries))
        return dataclasses.replace(
            answer, status="write_failed", reason=str(error), records=records
        )
    return dataclasses.replace(
        answer,
        entries=entries,
        cooled=len(cooled),
        excluded=answer.excluded + len(answer.entries) - len(entries),
        turn=found.clock.messages,
        records=_json(records),
        is_recorded=bool(records) and asked.mark == "return",
    )


def _records(
    asked: Ask, found: State | None, place: Place | None, entries: Sequence[Entry]
) -> dict[str, Record]:
    """Return the record of each entry, as of the clock that was found."""
    clock = found.clock if found else None
    turn = clock.messages if clock else 0
    return {
        entry.uri: Record(
            turn,
            entry.tier,
            asked.policy.unit,
            asked.policy.n,
            clock.turns if clock else None,
            clock.tokens if clock else None,
            found.ledger.idle(turn) + 1
            if found and place.rules.counts_idle_recalls
            else 0,
        )
        for entry in entries
    }


def _json(records: Mapping[str, Record]) -> dict[str, Mapping]:
    return {uri: record.to_json() for uri, record in records.items()}


def _noted(
    asked: Ask,
    place: Place,
    found: State,
    entries: Sequence[Entry],
    records: Mapping[str, Record],
) -> Ledger | None:
    """Return the ledger after this recall, None if it says nothing new."""
    key, turn = _key(asked, place), found.clock.messages
    new = found.ledger
    if records and asked.mark == "return":
        new = ledger.recorded(new, key, records)
        kept = cooldown.kept(
            asked.policy, new.of(key), found.clock, place.rules.keeps_window
        )
        new = ledger.capped(new, key, kept)
    if records and (asked.is_named or asked.mark == "append"):
        answer = Request(
            asked.actor,
            asked.query_digest,
            turn,
            tuple(dataclasses.asdict(entry) for entry in entries),
            _json(records),
            asked.mark == "append",
        )
        new = ledger.requested(new, asked.id, answer)
    if place.rules.counts_idle_recalls:
        idle = new.idle(turn) + 1
        new = dataclasses.replace(new, idle_turn=turn, idle_recalls=idle)
    return new if new != found.ledger else None


def searcher(retriever: Retriever, principal, asked: Ask) -> SearchFn:
    """Return the search of one recall; what its scope does not cover is dropped."""

    def search(limit: int) -> Sequence[Hit]:
        hits = retriever.search(
            principal, asked.query, limit, asked.actor, asked.peer_scope
        )
        return [h for h in hits if views.covers(h.uri, asked.actor, asked.peer_scope)]

    return search
