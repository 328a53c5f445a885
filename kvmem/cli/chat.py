"""Chat in the terminal, with a memory that can be stopped and continued.

    kvmem chat configs/models/smollm2.toml --session travel
    > /remember The user's sister lives in Lisbon.
    > Where does my sister live?

A session lives in a folder: who said what, what is remembered, and the KV of it all.
Started again, with the same model on whatever topology, it goes on where it stood.
Under each reply stands what was recalled and what was reused.

    /remember TEXT   keep a memory          /forget URI   erase it, its KV too
    /who             whose session this is  /quit         stop (Ctrl-D too)
"""

import dataclasses
import io
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from kvmem import config, console, errors
from kvmem.serve import SamplingParams

if TYPE_CHECKING:
    from kvmem.conversation import Conversation, Reply

__all__ = ["Arguments", "run"]

_Text = Annotated[
    str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: none)")
]


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Chat in the terminal, with a memory that can be stopped and continued.

    Args:
        path: a TOML config.
        session: which conversation; a new name begins one.
        root: the folder of sessions and of their KV.
        account: the outer name of whom it belongs to.
        user: whose sessions these are.
        actor: who acts for the user; memories of other actors are not seen.
        system: what the system message says; the chat template's own if not given.
        placement: memories stand at the tail of the user's message, or in the system
            message, where they cost the reuse of all that follows.
        memories: that a turn recalls at most.
        cooldown: messages for which a memory that was recalled is held back; 0 to
            hold nothing back. "resident": while it is in sight.
        max_tokens: tokens of a reply at most.
        temperature: logits are divided by it; 0 is greedy.
        seed: decides what is sampled.
    """

    path: tyro.conf.Positional[str]
    session: str
    root: str = "runs/chat"
    account: str = "local"
    user: str = "me"
    actor: _Text = ""
    system: _Text = ""
    placement: Literal["tail", "system"] = "tail"
    memories: int = 4
    cooldown: int | Literal["resident"] = "resident"
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    set: console.Overrides = ()


def run(arguments: Arguments) -> int:
    """Chat until the input ends."""
    from kvmem.conversation import Conversations
    from kvmem.session import SessionStore, messages

    sampling = SamplingParams(
        arguments.max_tokens, arguments.temperature, seed=arguments.seed
    )
    _options(arguments, sampling, messages(0))  # what cannot be is said at once
    root = pathlib.Path(arguments.root)
    sets = [f"store.root={root / 'pages'}", *arguments.set]
    engine = config.load(arguments.path, sets, os.environ).engine()
    sessions = SessionStore.open(root / "sessions")
    conversations = Conversations(engine, sessions)
    with conversations:
        me = sessions.principal(arguments.account, arguments.user)
        options = _options(arguments, sampling, conversations.resident(me))
        session = me.session(arguments.session)
        _chat(conversations.open(session, arguments.actor or None, options))
    return console.DONE


def _chat(talk: "Conversation") -> None:
    _greet(talk)
    for line in _lines():
        if line == "/quit":
            break
        _answer(talk, line)


def _options(arguments: Arguments, sampling: SamplingParams, resident):
    from kvmem.conversation import Options
    from kvmem.session import messages

    n = arguments.cooldown
    return Options(
        sampling=sampling,
        system=arguments.system or None,
        placement=arguments.placement,
        cooldown=resident if n == "resident" else messages(n),
        memories=arguments.memories,
    )


def _greet(talk: "Conversation") -> None:
    """Say what there is of the session."""
    count = len(talk.session.messages())
    judged = talk.judged()
    if judged.chain is None:
        kept = f"no KV to go on from ({judged.reason})"
    else:
        kept = f"KV of {judged.chain.num_rows} tokens"
    print(f"[{talk.session.id}: {count} messages, {kept}]")


def _lines() -> Iterator[str]:
    """Yield what is typed, line by line; a prompt is shown to a terminal alone."""
    asks = sys.stdin.isatty()
    for stream in (sys.stdin, sys.stdout):  # bytes that are no text end no chat
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _answer(talk: "Conversation", line: str) -> None:
    """Do what a line says; a refusal is said, and the chat goes on.

    So it does where Ctrl-C stops a reply: what was asked stays in the log.
    """
    try:
        if line.startswith("/"):
            print(f"[{_command(talk, line)}]")
            return
        turn = talk.turn(line)
        for delta in turn.deltas():
            print(delta.text, end="", flush=True)
        print(f"\n[{_said(turn.reply)}]")
    except (errors.KVMemError, OSError) as refused:
        print(f"[{refused}]")
    except KeyboardInterrupt:
        print("\n[stopped]")


def _command(talk: "Conversation", line: str) -> str:
    me = talk.session.principal
    verb, _, rest = line.partition(" ")
    if verb == "/remember" and rest.strip():
        item = me.remember(rest.strip(), peer=talk.actor, actor=talk.actor)
        return f"remembered as {item.uri}"
    if verb == "/forget" and rest.strip():
        gone = me.forget(rest.strip(), actor=talk.actor)
        return f"forgotten: {', '.join(gone) or 'nothing was there'}"
    if verb == "/who" and not rest:
        actor = f", acting as {talk.actor}" if talk.actor else ""
        memories = [item.uri for item in me.items.list(actor=talk.actor)]
        known = ", ".join(memories) or "none"
        return f"{me.user} of {me.account}{actor}; memories: {known}"
    return "/remember TEXT, /forget URI, /who, /quit"


def _said(reply: "Reply") -> str:
    """Say what a turn recalled, reused and saved."""
    found = reply.resume
    entries = reply.recall.entries if reply.recall else ()
    recalled = ", ".join(each.uri for each in entries) or "nothing"
    words = f"recalled {recalled}; reused {found.num_reused} of {found.num_prompt}"
    words += " tokens"
    if reply.saved_s is not None:
        words += f", about {reply.saved_s * 1e3:.0f} ms saved"
    if found.reason not in (None, "new"):
        words += f" ({found.reason})"
    if reply.output.store_error:
        words += f"; not kept: {reply.output.store_error}"
    return words
