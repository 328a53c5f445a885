"""Commit: live messages become history, and an extractor may read them.

The law: a commit archives under the lock and extracts outside it. The archive is
durable before the live log lets go of its messages, and is marked extracted after what
was found is kept; so a kill anywhere is made good by the next commit, and nothing is
archived or remembered twice. What came from recall is never handed to an extractor:
it would be remembered again as if somebody had said it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
    if not isinstance(keep, int) or keep < 0:
        law = "a commit keeps a number of messages live"
        raise ConfigError(say(f"keep={keep!r}", law, "Pass 0 or more"))
    done = _archive(place, generation, keep)
    if extract is None:
        return done
    return _extract(place, generation, done, extract, remember)


def said(found: Sequence[Line]) -> tuple[Message, ...]:
    """Return messages without what came from recall; those with nothing else go.

    That is every context part, and in the message that carries a recall the memories'
    own words, should they stand in its text.
    """
    kept = []
    for line in found:
        one = message.from_line(line.seq, line.stored)
        texts = [p["text"] for p in one.parts if p["type"] == "context" and "text" in p]
        parts = tuple(
            _without(part, texts) for part in one.parts if part["type"] != "context"
        )
        parts = tuple(p for p in parts if p["type"] != "text" or p["text"].strip())
        if parts:
            kept.append(dataclasses.replace(one, parts=parts))
    return tuple(kept)


def _without(part, texts: Sequence[str]):
    if part["type"] != "text":
        return part
    text = part["text"]
    for each in texts:
        if each:
            text = text.replace(each, "")
    return part if text == part["text"] else {**part, "text": text}


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
    """Hand every archive that was not extracted yet to the extractor, in order."""
    count = 0
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
            found = said(archive.read(place, each).lines)
            texts = list(extract(found)) if found else []
            prefix = f"{place.identity.session}/{generation}/{each.name}"
            count += _kept(texts, prefix, remember)
            with place.locked():
                tombstone.check(place, generation)
                archive.mark_extracted(place, each.name)
    return done._replace(extracted=count)


def _kept(found: Sequence, prefix: str, remember: KeepFn) -> int:
    """Keep texts, each under a key of its own; return how many are kept.

    An extraction that was cut off is done again, and may find other words: what it had
    kept by then stands, also where somebody has forgotten it since.
    """
    count = 0
    for number, each in enumerate(found):
        text, peer = (each, None) if isinstance(each, str) else each
        with contextlib.suppress(Conflict, Deleted):
            if text.strip():
                remember(text, peer, f"{prefix}/{number}")
                count += 1
    return count
