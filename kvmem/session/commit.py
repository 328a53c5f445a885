"""Commit: live messages become history, and an extractor may read them.

The law: a commit archives under the lock and extracts outside it. The archive is
durable before the live log lets go of its messages, and is marked extracted after what
was found is kept; so a kill anywhere is made good by the next commit, and nothing is
archived or remembered twice. What came from recall is never handed to an extractor:
it would be remembered again as if somebody had said it.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvmem.errors import Busy, ConfigError, Conflict, Deleted, say
from kvmem.session import archive, lines, log, message, meta, state, tombstone
from kvmem.session.lines import Line, Log
from kvmem.session.message import Message
from kvmem.session.place import LOG, Place

# Called with an archive's messages without what was recalled; returns what to remember:
# texts of the user's own, or (text, peer).
ExtractFn = Callable[[Sequence[Message]], Iterable[str | tuple[str, str | None]]]
# Called with a text, the peer it is about and a key of its own; keeps it once a key.
KeepFn = Callable[[str, str | None, str], object]
_HALF = re.compile("[\ud800-\udfff]")  # of a character beyond U+FFFF


class Committed(NamedTuple):
    """What a commit did."""

    status: Literal["archived", "skipped"]
    reason: str | None = None  # of a skip
    first: int = 0  # messages first to stop - 1 were archived
    stop: int = 0
    extracted: int = 0  # texts that were kept
    pending: int = 0  # archives that another process is extracting right now


def run(
    place: Place,
    generation: int | None,
    keep: int,
    extract: ExtractFn | None,
    remember: KeepFn | None,
) -> Committed:
    """Archive all but the newest `keep` messages, whole batches, and extract."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        law = "a commit keeps a number of messages live"
        raise ConfigError(say(f"keep={keep!r}", law, "Pass 0 or more"))
    done = _archive(place, generation, keep)
    if extract is None:
        return done
    return _extract(place, generation, done, extract, remember)


def said(found: Sequence[Line]) -> tuple[Message, ...]:
    """Return messages without what came from recall; those with nothing else go.

    That is every context part, and a text part that is one of the message's memories
    or all of them and nothing else. Words around them are the speaker's, who may say
    the same.
    """
    kept = []
    for line in found:
        one = message.from_line(line.seq, line.stored)
        told = [p["text"] for p in one.parts if p["type"] == "context" and "text" in p]
        recalled = {"", "\n\n".join(told).strip(), *(text.strip() for text in told)}
        parts = tuple(
            _whole(part)
            for part in one.parts
            if part["type"] != "context"
            and not (part["type"] == "text" and part["text"].strip() in recalled)
        )
        if parts:
            kept.append(dataclasses.replace(one, parts=parts))
    return tuple(kept)


def _whole(part: Mapping) -> Mapping:
    """Return a part without halves of characters, as logs of before may have them."""
    if part["type"] != "text" or not _HALF.search(part["text"]):
        return part
    return {**part, "text": _HALF.sub("\ufffd", part["text"])}


def _archive(place: Place, generation: int | None, keep: int) -> Committed:
    if not place.io.is_file(place.file(LOG)):
        return Committed("skipped", "no_messages")
    with place.locked():
        tombstone.check(place, generation)
        live, _ = log.mended(place, log.read(place))
        live = archive.finish(place, live, archive.listed(place))
        count = max(0, len(live.lines) - keep)
        while count and count < len(live.lines) and live.lines[count].k:
            count -= 1
        if not count:
            return Committed("skipped", "no_messages")
        place.settle(live)
        part = _first(live, count)
        found = state.read(place)
        if any("carries" in line.stored for line in part.lines):
            state.write_ledger(place, found, found.ledger)
        archive.write(place, part)
        commits = meta.count(meta.read(place), "commit_count") + 1
        live = archive.cut(place, live, count)
        meta.update(place, live, commit_count=commits, last_commit_at=meta.timestamp())
    return Committed("archived", None, part.start.messages, part.clock.messages)


def _first(live: Log, count: int) -> Log:
    """Return a log of the first lines."""
    head = live.lines[:count]
    clock = lines.advance(live.start, [line.stored for line in head])
    keys = {k: b for k, b in live.keys.items() if b.stop <= clock.messages}
    return live._replace(lines=head, clock=clock, keys=keys)


def _extract(
    place: Place,
    generation: int | None,
    done: Committed,
    extract: ExtractFn,
    remember: KeepFn,
) -> Committed:
    """Hand every archive that was not extracted yet to the extractor, in order.

    One that cannot be extracted waits and is told of at the end: it stops no other.
    """
    count, faults = 0, []
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(place.locked("extract", wait_s=0.0))
        except Busy:
            pending = sum(not each.is_extracted for each in archive.listed(place))
            return done._replace(pending=pending)
        for each in archive.listed(place):
            if each.is_extracted:
                archive.settle(place, each)
                continue
            try:
                found = said(archive.read(place, each).lines)
                texts = _texts(extract(found)) if found else []
                prefix = f"{place.identity.session}/{generation}/{each.name}"
                count += _kept(texts, prefix, remember)
            except Exception as fault:  # whatever an extractor may raise
                tombstone.check(place, generation)
                faults.append(fault)
                continue
            with place.locked():
                tombstone.check(place, generation)
                archive.mark_extracted(place, each.name)
    for other in faults[1:]:
        faults[0].add_note(f"and {other!r}")
    if faults:
        raise faults[0]
    return done._replace(extracted=count)


def _texts(found: object) -> list[tuple[str, str | None]]:
    """Return what an extractor found, each with its peer, or raise ConfigError."""
    is_many = isinstance(found, Iterable) and not isinstance(found, str | Mapping)
    texts = [(x, None) if isinstance(x, str) else x for x in found] if is_many else None
    if texts is None or not all(map(_is_text, texts)):
        law = "an extractor returns a list of texts, or of (text, peer)"
        asked = f"an extractor that returned {ascii(found)[:60]}"
        raise ConfigError(say(asked, law, "Return [] where there is nothing"))
    return texts


def _is_text(found: object) -> bool:
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    return is_pair and isinstance(found[0], str) and isinstance(found[1], str | None)


def _kept(found: Sequence[tuple], prefix: str, remember: KeepFn) -> int:
    """Keep texts, each under a key of its own; return how many are kept.

    An extraction that was cut off is done again, and may find other words: what it had
    kept by then stands, also where somebody has forgotten it since.
    """
    count = 0
    for number, (text, peer) in enumerate(found):
        with contextlib.suppress(Conflict, Deleted):
            if text.strip():
                remember(text, peer, f"{prefix}/{number}")
                count += 1
    return count
