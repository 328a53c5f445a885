"""A conversation: a session's next turn, on top of what was computed for the last one.

    recall ► the user's message, memories at its end ► reply ► its message ► the chain

Each step is durable before the next begins, and the manifest is last: a turn that was
cut off is in the log as far as it came, and costs a prefill. The law: an answer is the
one that the model gives to the whole transcript, whatever was found again.

    talk = conversations.open(me.session("s1"))
    reply = talk.say("Which tea does she like?")
    reply.text, reply.resume.num_reused, reply.recall.entries
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

from kvmem.conversation import resume, transcript
from kvmem.conversation.chain import Chain, Facts, Span
from kvmem.conversation.resume import Judged, Resume
from kvmem.conversation.transcript import Prompt, Turn
from kvmem.errors import Conflict
from kvmem.serve import Engine, SamplingParams
from kvmem.serve.identity import Identity
from kvmem.serve.request import Delta, Output
from kvmem.session import Cooldown, Recall, Session, messages

__all__ = ["Conversation", "Options", "Reply"]

Placement = Literal["tail", "system"]
_LEAST_TIMED = 16  # prefilled tokens that say how long one takes


@dataclasses.dataclass(frozen=True)
class Options:
    """How a conversation goes.

    Args:
        sampling: of replies.
        system: what the system message says; None: the template's own.
        placement: memories go to the "tail" of the user's message and stay there, or
            into the "system" message, anew each turn: then nothing behind it is reused
            where they change.
        cooldown: for how long a memory that was served is held back.
        memories: that a turn recalls at most; 0: none.
    """

    sampling: SamplingParams = SamplingParams(max_tokens=128)
    system: str | None = None
    placement: Placement = "tail"
    cooldown: Cooldown = messages(3)
    memories: int = 4


@dataclasses.dataclass(frozen=True)
class Reply:
    """One turn: what was answered, recalled and reused.

    `saved_s` is the time that prefilling the reused tokens would have taken, at this
    turn's own rate; None where it prefilled too few to tell.
    """

    text: str
    output: Output
    resume: Resume
    recall: Recall | None
    saved_s: float | None


class Conversation:
    """One actor's side of one session, on one engine; `Conversations.open` makes it."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        actor: str | None,
        facts: Facts,
        identity: Identity,
        options: Options,
    ):
        self.engine, self.session, self.actor = engine, session, actor
        self.options = options
        self._facts, self._identity = facts, identity

    def say(self, text: str, key: str | None = None) -> Reply:
        """Take a user's message and answer it.

        Args:
            text: what the user says.
            key: of this turn: said again under it, nothing is stored twice.

        A page store that could not keep the turn is no error: the output says so in
        `store_error`, and the next turn prefills what is missing.
        """
        turn = self.turn(text, key)
        for _ in turn.deltas():
            pass
        return turn.reply

    def turn(self, text: str, key: str | None = None) -> "TurnInProgress":
        """Take a user's message; `deltas` of what is returned streams the reply."""
        recall = self._recalled(text, key)
        memories = [
            {"type": "context", "uri": each.uri, "text": each.text}
            for each in (recall.entries if recall else ())
            if each.text
        ]
        is_tail = self.options.placement == "tail"
        parts = [{"type": "text", "text": text}, *(memories if is_tail else ())]
        carries = [recall] if recall and recall.entries and is_tail else ()
        self._append("user", parts, key, carries)
        return TurnInProgress(self, recall, () if is_tail else tuple(memories), key)

    def chain(self) -> Judged:
        """Return the chain as the log and this engine let it stand."""
        return self._judged(self._turns())

    def prompt(
        self, system_memories: tuple[dict, ...] = ()
    ) -> tuple[Prompt, Judged, int]:
        """Return what is fed next, on what chain, and the manifest's generation."""
        turns = self._turns()
        _, generation = self.session.chains.get(self.actor)
        judged = self._judged(turns)
        headed = (*self._system(system_memories), *turns)
        fed = transcript.prompt(self.engine.tokenizer, headed, judged.chain)
        return fed, judged, generation

    def keep(self, prompt: Prompt, output: Output, seq: int, generation: int) -> None:
        """Write the manifest of what was fed and generated, if nobody was faster."""
        tokens = (*prompt.ids, *output.output_ids)
        (reply,) = (t for t in self._turns() if t.seq == seq)
        span = Span(
            seq, prompt.reply_start, len(tokens), reply.digest, None, is_open=True
        )
        rows = len(tokens) - 1  # the last token was returned and never fed
        made = Chain(self._facts, tokens, rows, (*prompt.spans, span))
        with contextlib.suppress(Conflict):  # the other's is as good: KV is a cache
            self.session.chains.put(self.actor, made.encode(), generation)

    def _recalled(self, text: str, key: str | None) -> Recall | None:
        if not self.options.memories:
            return None
        is_tail = self.options.placement == "tail"
        return self.session.principal.recall(
            text,
            session=self.session,
            cooldown=self.options.cooldown,
            actor=self.actor,
            request_id=key,
            mark="append" if is_tail else "return",
            limit=self.options.memories,
        )

    def _append(self, role: str, parts: list, key: str | None, carries=()) -> int:
        """Append one message, once, and return its number."""
        appended = self.session.append(
            [{"role": role, "parts": parts}],
            key=None if key is None else f"{key}/{role}",
            actor=self.actor,
            carries=carries,
        )
        return appended.first

    def _turns(self) -> tuple[Turn, ...]:
        return transcript.turns_of(self.session.live(), self.actor)

    def _system(self, memories: tuple[dict, ...]) -> tuple[Turn, ...]:
        """Return the system message, if it is not the template's own."""
        said = self.options.system
        if said is None and not memories:
            return ()
        parts = [] if said is None else [{"type": "text", "text": said}]
        return (Turn(-1, "system", (*parts, *memories)),)

    def _judged(self, turns: tuple[Turn, ...]) -> Judged:
        """Judge the actor's chain; without one, the one that all share."""
        newest = max((turn.seq for turn in turns), default=-1)
        held = self.session.chains
        first = None
        for actor in dict.fromkeys((self.actor, None)):
            blob, _ = held.get(actor)
            fault = held.fault(actor) if blob is None else None
            judged = resume.judge(blob, fault, self._facts, newest)
            if judged.chain is not None:
                return judged
            first = first or judged
        return first


class TurnInProgress:
    """A turn whose user message is in the log; stream `deltas`, then see `reply`."""

    def __init__(
        self,
        talk: Conversation,
        recall: Recall | None,
        system_memories: tuple[dict, ...],
        key: str | None,
    ):
        self.recall = recall
        self.reply: Reply | None = None
        self._talk, self._key = talk, key
        self._prompt, self._judged, self._generation = talk.prompt(system_memories)

    def deltas(self) -> Iterator[Delta]:
        """Yield the reply's tokens; after the last one it is logged and kept."""
        talk, engine = self._talk, self._talk.engine
        request_id = engine.add(self._prompt.ids, talk.options.sampling, talk._identity)
        try:
            yield from engine.follow(request_id)
        except BaseException:
            engine.abort(request_id)
            raise
        output = engine.take_output(request_id)
        self._finish(output)

    def _finish(self, output: Output) -> None:
        talk = self._talk
        parts = [{"type": "text", "text": output.text}]
        seq = talk._append("assistant", parts, self._key)
        talk.keep(self._prompt, output, seq, self._generation)
        found = resume.of(self._judged, self._prompt.ids, output)
        fresh = found.num_prompt - found.num_reused
        saved = None
        if fresh >= _LEAST_TIMED and output.first_token_s is not None:
            saved = output.first_token_s / fresh * found.num_reused
        self.reply = Reply(output.text, output, found, self.recall, saved)
