"""A turn: one message of the user's, taken and answered, and what it comes to.

The law: each step is durable before the next begins, and the manifest is last. A turn
that is left half way is in the log as far as it came, and one during which something
was forgotten keeps no KV, whatever it had been fed.

    turn = talk.turn("Which tea does she like?")
    for delta in turn.deltas():
        print(delta.text, end="")
    turn.reply.resume.num_reused
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvmem.conversation import resume
from kvmem.conversation.resume import Resume
from kvmem.errors import ConfigError, Conflict, say
from kvmem.serve.request import Delta, Output
from kvmem.session import Recall, late

if TYPE_CHECKING:
    from kvmem.conversation.conversation import Conversation

__all__ = ["Forgotten", "Reply", "TurnInProgress"]


@dataclasses.dataclass
class Forgotten:
    """How many memories were forgotten since conversations began, and what clears up.

    `collect` frees pages that no chain names: those of a turn that was fed a memory
    before it was forgotten, and was computed to its end afterwards. `catch_up` does so
    where a store without conversations has forgotten something meanwhile.
    """

    collect: Callable[[], object]
    catch_up: Callable[[], object]
    count: int = 0
    is_closed: bool = False

    def require_open(self) -> None:
        """Raise ConfigError where the conversations were closed."""
        if self.is_closed:
            law = "they were closed, and their page store with them"
            cure = "Make Conversations anew, and open the session there"
            raise ConfigError(say("a turn of these conversations", law, cure))


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn: what was answered, recalled and reused.

    `saved_s` is the time that prefilling the reused tokens would have taken, at the
    best rate of this conversation's turns; None in the first, which compiles. A turn
    that was said again under its key is answered from the log, and has no output.
    """

    text: str
    recall: Recall | None
    output: Output | None = None
    resume: Resume | None = None
    saved_s: float | None = None


class TurnInProgress:
    """A turn whose user message is in the log; stream `deltas`, then see `reply`."""

    def __init__(
        self,
        talk: "Conversation",
        recall: Recall | None,
        system_memories: tuple[dict, ...],
        key: str | None,
    ):
        self.recall = recall
        self.reply: Reply | None = None
        self._talk, self._key = talk, key
        self._system_memories, self._forgotten = system_memories, talk.forgotten.count

    def deltas(self) -> Iterator[Delta]:
        """Yield the reply's tokens; after the last one it is logged and kept.

        What is fed is what the log says when this begins. Where something was forgotten
        since the turn was taken, no memory that was meant for the system message is.
        """
        talk, engine = self._talk, self._talk.engine
        if self.reply is None:  # another turn under its key may have been answered
            self.reply = talk.logged(self._key, self.recall)
        if self.reply is not None:
            return
        self._begin()
        request_id = engine.add(self._prompt.ids, talk.options.sampling, talk.identity)
        try:
            yield from engine.follow(request_id)
        except BaseException:
            engine.abort(request_id)
            raise
        output = engine.take_output(request_id)
        self._finish(output)

    def _begin(self) -> None:
        """Read what is fed, and what there is of it."""
        talk, count = self._talk, self._talk.forgotten.count
        talk.forgotten.require_open()
        memories = self._system_memories if count == self._forgotten else ()
        gone = late.gone(talk.session.principal, (each["uri"] for each in memories))
        memories = tuple(each for each in memories if each["uri"] not in gone)
        self._system_uris = frozenset(each["uri"] for each in memories)
        self._forgotten = count
        _, self._generation = talk.session.chains.get(talk.actor)
        self._judged, self._prompt = talk.judged(), talk.prompt(memories)

    def _finish(self, output: Output) -> None:
        talk = self._talk
        try:
            seq = talk.log_reply(output, self._key)
        except Conflict:  # another turn under its key was faster
            self.reply = talk.logged(self._key, self.recall)
            if self.reply is None:
                raise
            return
        held = (self._prompt, output, seq, self._generation, self._system_uris)
        if talk.forgotten.count != self._forgotten or not talk.keep(*held):
            talk.forgotten.collect()
        found = resume.of(self._judged, self._prompt.ids, output)
        saved = talk.saved(found, output)
        self.reply = Reply(output.text, self.recall, output, found, saved)
