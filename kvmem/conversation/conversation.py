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
    Message,
    Recall,
    Session,
    ids,
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
        if key is not None:
            ids.check_key(f"{ids.check_key(key)}/assistant")  # what a reply is kept by
        before, recall = self._asked(text, key), self._recalled(text, key)
        memories = [
            {"type": "context", "uri": each.uri, "text": each.text}
            for each in (recall.entries if recall else ())
            if each.text
        ]
        is_tail = self.options.placement == "tail"
        turn = TurnInProgress(self, recall, () if is_tail else tuple(memories), key)
        if before is not None:
            turn.reply = self._logged(key, recall)
            return turn
        parts = [{"type": "text", "text": text}, *(memories if is_tail else ())]
        carries = [recall] if recall and recall.entries and is_tail else ()
        self._require_fits(parts, () if is_tail else tuple(memories))
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

    def keep(self, prompt: Prompt, output: Output, seq: int, generation: int) -> None:
        """Write the manifest of what was fed and generated, if nobody was faster."""
        tokens = (*prompt.ids, *output.output_ids)
        span = Span(seq, prompt.reply_start, len(tokens))
        rows = len(tokens) - 1  # the last token was returned and never fed
        made = Chain(self._facts, tokens, rows, (*prompt.spans, span))
        with contextlib.suppress(Conflict):  # the other's is as good: KV is a cache
            self.session.chains.put(self.actor, made.encode(), generation)

    def saved(self, found: Resume, output: Output) -> float | None:
        """Return the seconds that prefilling what a turn reused would have taken."""
        fresh = found.num_prompt - found.num_reused
        best, self._best_s = self._best_s, self._best_s or float("inf")
        if fresh >= _LEAST_TIMED and output.first_token_s is not None:
            self._best_s = min(self._best_s, output.first_token_s / fresh)
        if best is None or self._best_s == float("inf"):
            return None
        return self._best_s * found.num_reused

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

    def _append(self, role: str, parts: list, key: str | None, carries=()) -> Appended:
        """Append one message, once."""
        message = {"role": role, "parts": parts}
        return self.session.append(
            [message if key is None else {**message, "turn_id": key}],
            key=None if key is None else f"{key}/{role}",
            actor=self.actor,
            carries=carries,
        )

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

    def _logged(self, key: str, recall: Recall | None) -> Reply | None:
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
