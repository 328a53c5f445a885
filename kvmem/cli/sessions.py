"""Serve sessions over HTTP, and make the keys of those who may ask.

    kvmem sessions keys add --root DIR --account lab --user ann   prints a key, once
    kvmem sessions keys list --root DIR                           whose keys there are
    kvmem sessions keys revoke --root DIR --key ID                take one back
    kvmem sessions serve --root DIR                               until Ctrl-C

A key is one user of one account. The service speaks HTTP on loopback; to be reached
from elsewhere it stands behind whatever ends TLS there. A running service sees keys
that are added or taken back.
"""

import dataclasses
import datetime
from typing import Annotated, Literal

import tyro

from kvmem import console, errors, exits

__all__ = ["Arguments", "run"]

_USES = {
    ("serve",): {"host", "port"},
    ("keys", "add"): {"account", "user"},
    ("keys", "list"): set(),
    ("keys", "revoke"): {"key"},
}
_MAX_PORT = 65535


def _text(metavar: str) -> object:
    note = tyro.conf.arg(metavar=metavar, help_behavior_hint="(default: none)")
    return Annotated[str, note]


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Serve sessions over HTTP, and make the keys of those who may ask.

    Args:
        action: serve: answer until told to stop; keys add: make a key of a user and
            print it, this once; keys list: say whose keys there are; keys revoke:
            take one back.
        root: the folder of the sessions and of their keys.
        account: keys add: the account of the user.
        user: keys add: whose key it is.
        key: keys revoke: id of the key, as keys list says it.
        host: serve: the address to listen on.
        port: serve: the port; 0 takes a free one.
    """

    action: Annotated[
        tyro.conf.Positional[
            tuple[Literal["serve", "keys", "add", "list", "revoke"], ...]
        ],
        tyro.conf.arg(
            metavar="serve | keys add | keys list | keys revoke",
            help_behavior_hint="(required)",
        ),
    ]
    root: Annotated[str, tyro.conf.arg(metavar="DIR")]
    account: _text("NAME") = ""
    user: _text("NAME") = ""
    key: _text("ID") = ""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8350


def run(arguments: Arguments) -> int:
    """Do one action and return its exit code."""
    _check(arguments)
    if arguments.action == ("serve",):
        return _serve(arguments)
    from kvmem.session.keys import KeyRing

    ring = KeyRing(arguments.root)
    if arguments.action == ("keys", "add"):
        print(ring.add(arguments.account, arguments.user))
    elif arguments.action == ("keys", "revoke"):
        ring.revoke(arguments.key)
    else:
        table = console.table("keys", "id", "account", "user", "made")
        for key in ring.rows():
            made = datetime.datetime.fromtimestamp(key.created, datetime.UTC)
            table.add_row(key.id, key.account, key.user, f"{made:%Y-%m-%d %H:%M} UTC")
        console.out().print(table)
    return exits.DONE


def _serve(arguments: Arguments) -> int:
    from kvmem.session import SessionStore, service

    def started(host: str, port: int) -> None:
        print(f"sessions of {arguments.root}: http://{host}:{port}", flush=True)

    store = SessionStore.open(arguments.root)
    service.serve(store, arguments.root, arguments.host, arguments.port, None, started)
    return exits.DONE


def _check(arguments: Arguments) -> None:
    """Raise for an action that is none, or flags that it lacks or cannot use."""
    asked = " ".join(("kvmem sessions", *arguments.action))
    if arguments.action not in _USES:
        known = ", ".join(" ".join(action) for action in _USES)
        raise _bad(asked, f"its actions are {known}", "Give one of them")
    used = _USES[arguments.action]
    given = {n for n in ("account", "user", "key") if getattr(arguments, n)}
    if needed := (used & {"account", "user", "key"}) - given:
        flags = ", ".join(f"--{name}" for name in sorted(needed))
        raise _bad(asked, f"it needs {flags}", f"Give {flags}")
    if idle := given - used:
        flags = ", ".join(f"--{name}" for name in sorted(idle))
        raise _bad(f"{asked} with {flags}", "it has no use for that", "Leave it out")
    if not 0 <= arguments.port <= _MAX_PORT:
        law = f"ports are 0 to {_MAX_PORT}"
        raise _bad(f"{asked} --port {arguments.port}", law, "Give one of them")


def _bad(asked: str, law: str, cure: str) -> errors.ConfigError:
    return errors.ConfigError(errors.say(asked, law, cure))
