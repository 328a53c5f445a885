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
from collections.abc import Sequence
from typing import Literal

from kvmem.conversation import resume, transcript
from kvmem.conversation.chain import Chain, Facts, Span
from kvmem.conversation.resume import Judged, Resume
from kvmem.conversation.transcript import Prompt, Turn
from kvmem.conversation.turn import Forgotten, Reply, TurnInProgress
from kvmem.errors import ConfigError, Conflict, say
from kvmem.serve import Engine, SamplingParams
from kvmem.serve.identity import Identity
from kvmem.serve.request import Output
from kvmem.session import (
    Appended,
    Cooldown,
    Entry,
    Message,
    Recall,
    Session,
    ids,
    late,
    messages,
)

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

    def __post_init__(self):
        if self.placement not in ("tail", "system"):
            law = 'memories stand at the "tail" or in the "system" message'
            raise ConfigError(say(f"placement={self.placement!r}", law, "Give one"))
        if not isinstance(self.memories, int) or self.memories < 0:
            law = "a turn recalls 0 or more"
            cure = "Give a number; 0 recalls nothing"
            raise ConfigError(say(f"memories={self.memories!r}", law, cure))


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
        forgotten: Forgotten,
    ):
        self.engine, self.session, self.actor = engine, session, actor
        self.options = options
        self.identity, self._facts = identity, facts
        self.forgotten = forgotten  # by anybody, in this process
        self._transcript = transcript.Transcript(engine.tokenizer)
        self._best_s: float | None = None  # a prefilled token; None: no turn yet

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

    def turn(self, text: str, key: str | None = None) -> TurnInProgress:
        """Take a user's message; `deltas` of what is returned streams the reply."""
        self.forgotten.require_open()
        self.forgotten.catch_up()
        if key is not None:
            ids.check_key(self._named(ids.check_key(key), "assistant"))
        before, recall = self._asked(text, key), self._recalled(text, key)
        tail, system = self._placed(recall.entries if recall else ())
        turn = TurnInProgress(self, recall, system, key)
        if before is not None:
            turn.reply = self.logged(key, recall)
            return turn
        parts = [{"type": "text", "text": text}, *tail]
        carries = [recall] if recall and recall.entries and self._is_tail else ()
        self._require_fits(parts, system)
        self._append("user", parts, key, carries)
        return turn

    def prompt(self, system_memories: tuple[dict, ...] = ()) -> Prompt:
        """Return what is fed next: all that the log says, for this actor."""
        headed = (*self._system(system_memories), *self._turns())
        return self._transcript.prompt(headed)

    def judged(self) -> Judged:
        """Return the chain as the log and this engine let it stand.

        That is the actor's; without one, the one that all share.
        """
        newest = max((turn.seq for turn in self._turns()), default=-1)
        held, first = self.session.chains, None
        for actor in dict.fromkeys((self.actor, None)):
            blob, _ = held.get(actor)
            fault = held.fault(actor) if blob is None else None
            judged = resume.judge(blob, fault, self._facts, newest)
            if judged.chain is not None:
                return judged
            first = first or judged
        return first

    def log_reply(self, output: Output, key: str | None) -> int:
        """Append what was answered, with the ids that it was; return its number."""
        said = {"type": "text", "text": output.text}
        fed = transcript.ids_part(self.engine.tokenizer, output.output_ids)
        return self._append("assistant", [said, fed], key).first

    def keep(
        self,
        prompt: Prompt,
        output: Output,
        seq: int,
        generation: int,
        system_uris: frozenset[str],
    ) -> bool:
        """Write the manifest of what was fed and generated, if nobody was faster.

        Args:
            prompt: what was fed.
            output: what was generated.
            seq: the number that the reply has in the log.
            generation: of the actor's chain, when the turn began.
            system_uris: memories of the system message, which no log tells.

        Returns:
            Whether all of it stands yet: nothing of it was forgotten, by whoever.
        """
        tokens = (*prompt.ids, *output.output_ids)
        span = Span(seq, prompt.reply_start, len(tokens))
        rows = len(tokens) - 1  # the last token was returned and never fed
        made = Chain(self._facts, tokens, rows, (*prompt.spans, span))
        is_told = True

        def is_stale() -> bool:
            nonlocal is_told
            is_told = self._tells(prompt.spans, system_uris)
            return not is_told

        with contextlib.suppress(Conflict):  # the other's is as good: KV is a cache
            self.session.chains.put(self.actor, made.encode(), generation, is_stale)
        return is_told

    def saved(self, found: Resume, output: Output) -> float | None:
        """Return the seconds that prefilling what a turn reused would have taken."""
        fresh = found.num_prompt - found.num_reused
        best, self._best_s = self._best_s, self._best_s or float("inf")
        if fresh >= _LEAST_TIMED and output.first_token_s is not None:
            self._best_s = min(self._best_s, output.first_token_s / fresh)
        if best is None or self._best_s == float("inf"):
            return None
        return self._best_s * found.num_reused

    @property
    def _is_tail(self) -> bool:
        return self.options.placement == "tail"

    def _placed(self, entries: Sequence[Entry]) -> tuple[tuple, tuple]:
        """Return memories at the tail of the message, and those of the system's."""
        memories = tuple(
            {"type": "context", "uri": each.uri, "text": each.text}
            for each in entries
            if each.text
        )
        return (memories, ()) if self._is_tail else ((), memories)

    def _tells(self, spans: Sequence[Span], system_uris: frozenset[str]) -> bool:
        """Say whether the log, and items of the system message, tell spans yet."""
        if late.gone(self.session.principal, system_uris):
            return False
        logged = [s for s in spans if s.uri is not None and s.uri not in system_uris]
        if not logged:
            return True
        told: dict[str, int] = {}  # the message that tells it first
        for message in self.session.messages():
            for part in message.parts:
                told.setdefault(part.get("uri"), message.seq)
        return all(told.get(span.uri, span.seq + 1) <= span.seq for span in logged)

    def _require_fits(self, parts: list, system_memories: tuple[dict, ...]) -> None:
        """Refuse a message that leaves no room for a reply, before it is logged."""
        asked = Turn(self.session.clock, "user", tuple(parts))
        headed = (*self._system(system_memories), *self._turns(), asked)
        length = len(self._transcript.prompt(headed).ids)
        room, most = self.options.sampling.max_tokens, self.engine.config.max_length
        if length + room > most:
            raise ConfigError(
                say(
                    f"a transcript of {length} tokens and a reply of up to {room}",
                    f"a sequence has at most {most} tokens here",
                    "Archive what is old with session.commit(keep=...), or raise "
                    "serve.max_length",
                )
            )

    def _recalled(self, text: str, key: str | None) -> Recall | None:
        if not self.options.memories:
            return None

        def served(entries: Sequence[Entry]) -> bool:
            if not self._is_tail:  # a message that does not fit is told nothing
                _, system = self._placed(entries)
                self._require_fits([{"type": "text", "text": text}], system)
            return bool(entries)

        return self.session.principal.recall(
            text,
            session=self.session,
            cooldown=self.options.cooldown,
            actor=self.actor,
            request_id=None if key is None else self._named(key),
            mark="append" if self._is_tail else "return",
            limit=self.options.memories,
            served=served,
        )

    def _append(self, role: str, parts: list, key: str | None, carries=()) -> Appended:
        """Append one message, once."""
        message = {"role": role, "parts": parts}
        return self.session.append(
            [message if key is None else {**message, "turn_id": key}],
            key=None if key is None else self._named(key, role),
            actor=self.actor,
            carries=carries,
        )

    def _named(self, *parts: str) -> str:
        """Return a key as the session keeps it: each actor's turns have their own."""
        name = "/".join(parts)
        return name if self.actor is None else f"{name}@{self.actor}"

    def _asked(self, text: str, key: str | None) -> Message | None:
        """Return the user's message of a turn that was said before, archived or not.

        Raises:
            Conflict: it said something else.
        """
        asked = self._said("user", key)
        if asked is not None and asked.said != text:
            law = "another message was said under it"
            raise Conflict(say(f"a turn with key {key!r}", law, "Use a key a turn"))
        return asked

    def logged(self, key: str | None, recall: Recall | None) -> Reply | None:
        """Return what the log says was answered in a turn, None if nothing was."""
        answer = self._said("assistant", key)
        return answer and Reply(answer.text, recall)

    def _said(self, role: str, key: str | None) -> Message | None:
        """Return the message of a role in the turn of a key."""
        if key is None:
            return None
        return next(
            (
                each
                for each in self.session.messages()
                if (each.turn_id, each.role, each.actor) == (key, role, self.actor)
            ),
            None,
        )

    def _turns(self) -> tuple[Turn, ...]:
        return transcript.turns_of(self.session.live(), self.actor)

    def _system(self, memories: tuple[dict, ...]) -> tuple[Turn, ...]:
        """Return the system message, if it is not the template's own."""
        said = self.options.system
        if said is None and not memories:
            return ()
        parts = [] if said is None else [{"type": "text", "text": said}]
        return (Turn(-1, "system", (*parts, *memories)),)
