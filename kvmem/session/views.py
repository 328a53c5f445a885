"""What an actor sees of the user's tree, and how scopes rank.

A uri is a path in the user's own tree: `memories/tea`, `resources/map.md`. What stands
under `peers/NAME/` belongs to that peer; everything else is the user's self. The law:
under actor A, whatever lies in another peer's part is denied by its name alone, whether
it is there or not, to every verb; and a folder that may hold hidden peers can be listed
and searched (they are left out) and never changed as a whole.

    checked("peers/zhang/memories/a", actor="wang", verb="get")  # Denied
    covers("peers/wang/x", actor="wang", peer_scope="actor")      # True

Without an actor there is no view: the owner names anything. Recall and search still
take the self alone, unless peer_scope is "all", which ranks other peers lower and is
no isolation.
"""

import dataclasses
import unicodedata
from collections.abc import Sequence
from typing import Literal

from kvmem import errors
from kvmem.session import ids
from kvmem.session.search import Hit

__all__ = [
    "PeerScope",
    "checked",
    "checked_scope",
    "covers",
    "owned_by",
    "peer_of",
    "ranked",
    "sees",
]

PeerScope = Literal["actor", "all"]

_MAX_URI_NBYTES = 1024
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")  # controls, lone surrogates, line separators
_PENALTY, _MILD_PENALTY = 0.1, 0.02
_MILD = ("preferences", "experiences")


def owned_by(uri: str, peer: str | None) -> str:
    """Return a uri as one in the peer's part: `tea` of wang is `peers/wang/tea`.

    Raises:
        InvalidId: the uri stands in another peer's part.
    """
    _refuse_no_string(uri)
    if peer is None:
        return uri
    peer = ids.check_peer(peer)
    if uri.split("/")[0] != "peers":
        return f"peers/{peer}/{uri}"
    if peer_of(uri) != peer:
        raise _bad(uri, f"it is not a place of peer {peer!r}", "Leave peer= out")
    return uri


def peer_of(uri: str) -> str | None:
    """Return the peer whose part a uri lies in, None for the user's self."""
    first, _, rest = uri.partition("/")
    return rest.split("/")[0] or None if first == "peers" else None


def checked(uri: str, actor: str | None, verb: str, whole: bool = False) -> str:
    """Return a uri that this actor may use for a verb.

    Args:
        uri: a path; with `whole` also a folder: `""`, `peers`, `peers/NAME`.
        actor: whose view is asked, None for no view.
        verb: what is wanted, for the message; `list`, `search` and `stat` change
            nothing and may be given a folder that holds hidden peers.
        whole: the uri may name a folder.

    Raises:
        InvalidId: it is no path.
        Denied: it lies in another peer's part, or is a root that may hold some.
    """
    _refuse_bad_path(uri, whole)
    peer = peer_of(uri)
    if actor is None:
        return uri
    if peer is not None and peer != actor:
        raise errors.Denied(
            errors.say(
                f"{verb} {uri!r} as actor {actor!r}",
                "an actor sees its own peer's part and the user's self",
                f"Use peers/{actor}/..., or act as {peer!r}",
            )
        )
    if uri in ("", "peers") and verb not in ("list", "search", "stat"):
        raise errors.Denied(
            errors.say(
                f"{verb} {uri or 'the whole tree'} as actor {actor!r}",
                "it may hold peers that this actor does not see",
                f"Name what lies in it, as peers/{actor}",
            )
        )
    return uri


def checked_scope(peer_scope: str) -> PeerScope:
    """Return a peer scope, or raise ConfigError."""
    if peer_scope not in ("actor", "all"):
        law = 'a scope is "actor" (self and this actor) or "all" (ranked, no isolation)'
        asked = f"peer_scope={peer_scope!r}"
        raise errors.ConfigError(errors.say(asked, law, "Use one of them"))
    return peer_scope


def sees(uri: str, actor: str | None) -> bool:
    """Say whether listing shows a uri to this actor."""
    return actor is None or peer_of(uri) in (None, actor)


def covers(uri: str, actor: str | None, peer_scope: PeerScope) -> bool:
    """Say whether recall and search of this scope may return a uri."""
    return peer_scope == "all" or peer_of(uri) in (None, actor)


def ranked(
    hits: Sequence[Hit], actor: str | None, peer_scope: PeerScope
) -> tuple[Hit, ...]:
    """Return what the scope covers, best first, other peers' scores lowered.

    Under "all" another peer's hit loses 0.1, a preference or experience of it 0.02.
    """
    seen = [h for h in hits if covers(h.uri, actor, peer_scope)]
    lowered = [
        dataclasses.replace(h, score=h.score - _penalty(h.uri, actor)) for h in seen
    ]
    return tuple(sorted(lowered, key=lambda hit: -hit.score))


def _penalty(uri: str, actor: str | None) -> float:
    if peer_of(uri) in (None, actor):
        return 0.0
    return _MILD_PENALTY if set(uri.split("/")[2:-1]) & set(_MILD) else _PENALTY


def _refuse_bad_path(uri: str, whole: bool) -> None:
    """Raise InvalidId for what is no path of a user's tree."""
    _refuse_no_string(uri)
    if whole and uri == "":
        return
    segments = uri.split("/")
    if any(unicodedata.category(c) in _UNSEEN for c in uri) or "\\" in uri:
        raise _bad(uri, "a uri has no backslash, control or line separator", "Drop it")
    if len(uri.encode()) > _MAX_URI_NBYTES:
        law = f"a uri has at most {_MAX_URI_NBYTES} bytes"
        raise _bad(uri, law, "Use a shorter one")
    if unicodedata.normalize("NFC", uri) != uri:
        raise _bad(uri, "a uri is written in Unicode's NFC", "Normalise it")
    if any(segment in ("", ".", "..") for segment in segments):
        law = "a uri is names apart by single slashes, none of them '.' or '..'"
        raise _bad(uri, law, "Give it as memories/name")
    if segments[0] == "peers" and len(segments) > 1:
        if ids.check_peer(segments[1]) != segments[1]:
            raise _bad(uri, "a peer's name has no blanks around it", "Take them off")
    if not whole and segments[0] == "peers" and len(segments) < 3:
        law = "it is a folder of peers, not an item"
        raise _bad(uri, law, "Give peers/NAME/...")


def _refuse_no_string(uri: str) -> None:
    if not isinstance(uri, str):
        asked, law = f"a uri that is {ascii(uri)[:60]}", "a uri is a string"
        raise TypeError(errors.say(asked, law, "Give it as memories/name"))


def _bad(uri: str, law: str, cure: str) -> errors.InvalidId:
    return errors.InvalidId(errors.say(f"uri {ascii(uri[:60])}", law, cure))
