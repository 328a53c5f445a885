"""What memories cost: a hundred turns under each cooldown, in both places.

Memories are recalled for every turn of a conversation, and are put at the tail of the
user's message, where they stay, or into the system message, where they are put anew
each turn. A cooldown holds back what was served a moment ago. The same turns are taken
under every policy in both places, side by side on one engine, and of each we count

    injected       tokens of memories that were put into a prompt, and of these
    repeated       those of memories that had been put into an earlier prompt, and
    doubled        those whose text stood in the transcript already
    misses         turns whose memory was held back while its text was not in sight
    reused         tokens of a turn's prompt that were not computed again
    first_token_ms until the first token of the answer, in the median

A transcript that has grown too long is archived but for its newest messages.

    python -m experiments run configs/session_memory.toml
"""

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from experiments import session_memory_picture, tiny_decoder
from experiments.harness import Check, Record, RunConfig
from experiments.session_memory_prose import MOST_MEMORIES, Prose, Question
from kvmem import errors
from kvmem import session as sessions
from kvmem.config import Config as Served
from kvmem.config import ModelConfig, PoolConfig, StoreConfig
from kvmem.conversation import Conversations, Options, Reply
from kvmem.serve import Engine, Identity, SamplingParams, ServeConfig
from kvmem.session import Cooldown, Principal, SessionStore
from kvmem.settings import Nbytes

__all__ = ["Config", "Figures", "Talk", "Taken", "figures", "run"]

_PLACES = ("tail", "system")
_SYSTEM = "You answer in a few words."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        turns: of every conversation.
        memories: that the user has.
        recalled: memories that a turn recalls at most.
        seed: of all that is said.
        max_tokens: of an answer.
        longest: tokens of a transcript, above which old messages are archived ...
        keep: ... but for so many.
        cool_messages: window of the policy "messages".
        cool_turns: of "turns".
        cool_tokens: of "tokens".
        verify_every: each so many-th answer is compared with that of a prefill.
        model: who answers.
        pool: of its pages.
        serve: how it batches.
        chunk_tokens: of the page store.
        store_nbytes: that the page store may take.
        picture: where the picture goes.
    """

    turns: int = 100
    memories: int = 20
    recalled: int = 2
    seed: int = 0
    max_tokens: int = 8
    longest: int = 384
    keep: int = 6
    cool_messages: int = 3
    cool_turns: int = 3
    cool_tokens: int = 200
    verify_every: int = 20
    model: ModelConfig = ModelConfig("smollm2-135m-instruct", kv_dtype="float32")
    pool: PoolConfig = PoolConfig(page_size=16)
    serve: ServeConfig = ServeConfig()
    chunk_tokens: int = 16
    store_nbytes: Nbytes = Nbytes(4 << 30)
    picture: str = "runs/session_memory/session_memory.png"

    def __post_init__(self):
        if not 0 < self.memories <= MOST_MEMORIES or self.turns < 2:
            raise errors.ConfigError(
                errors.say(
                    f"{self.turns} turns with {self.memories} memories",
                    f"there are 1 to {MOST_MEMORIES} memories, and turns to compare",
                    "Change the values named",
                )
            )


@dataclasses.dataclass(frozen=True)
class Taken:
    """What one turn took."""

    prompt_tokens: int
    reused_tokens: int
    expected_tokens: int
    injected_tokens: int
    repeated_tokens: int
    doubled_tokens: int
    num_excluded: int
    is_missed: bool
    is_archived: bool  # old messages went before this turn
    first_token_s: float
    is_same: bool | None  # as a prefill's answer; None: not compared


@dataclasses.dataclass(frozen=True)
class Figures:
    """What all turns of one conversation took."""

    injected_tokens: int
    repeated_tokens: int
    doubled_tokens: int
    misses: int
    commits: int
    prompt_tokens_a_turn: float
    reused_tokens_a_turn: float
    first_token_ms: float


def run(config: Config) -> Iterator[Record]:
    """Yield what every policy cost in both places, and how long it took."""
    prose = Prose.draw(config.memories, config.turns, config.seed)
    with tempfile.TemporaryDirectory(prefix="kvmem-memory-") as folder:
        taken = _talked(config, prose, pathlib.Path(folder))
    found = {name: figures(turns) for name, turns in taken.items()}
    session_memory_picture.draw(
        pathlib.Path(config.picture),
        {name: dataclasses.asdict(each) for name, each in found.items()},
    )
    yield _counted(config, taken, found)
    yield Record(
        "session_memory_first_token",
        "measurement",
        "time to the first token, by cooldown and place of memories",
        "xla",
        repetitions=config.turns - 1,
        measurements={
            f"{name}_first_token_p50_ms": round(each.first_token_ms, 2)
            for name, each in found.items()
        },
    )


def _counted(
    config: Config,
    taken: Mapping[str, Sequence[Taken]],
    found: Mapping[str, Figures],
) -> Record:
    counts = {
        f"{name}_{figure}": round(value, 1)
        for name, each in found.items()
        for figure, value in dataclasses.asdict(each).items()
        if figure != "first_token_ms"
    }
    return Record(
        "session_memory",
        "correctness",
        "tokens injected and reused, and misses, by cooldown and place of memories",
        "xla",
        checks=_checks(taken),
        measurements=counts,
        facts={"turns": config.turns, "picture": config.picture},
    )


def _checks(taken: Mapping[str, Sequence[Taken]]) -> tuple[Check, ...]:
    """Check what must hold whatever the figures are."""
    every = [each for turns in taken.values() for each in turns]
    compared = [each.is_same for each in every if each.is_same is not None]
    free = [each for place in _PLACES for each in taken[f"{place}_never"]]
    kept = [each for place in _PLACES for each in taken[f"{place}_resident"]]
    tail = [
        each
        for name, turns in taken.items()
        if name.startswith("tail_")
        for each in turns[1:]
        if not each.is_archived
    ]
    late = [each for each in tail if each.reused_tokens < each.expected_tokens]
    doubled = sum(each.doubled_tokens for each in taken["tail_resident"])
    held = sum(each.num_excluded for each in free)
    missed = sum(each.is_missed for each in kept)
    return (
        Check(
            "answers are those of a prefill of the whole transcript",
            bool(compared) and all(compared),
            f"{sum(compared)} of {len(compared)} compared",
        ),
        Check("without a window nothing is held back", not held, f"{held} held back"),
        Check(
            "resident: no memory stands twice in a transcript",
            not doubled,
            f"{doubled} tokens twice",
        ),
        Check(
            "resident: nothing is held back that is out of sight",
            not missed,
            f"{missed} of {len(kept)} turns",
        ),
        Check(
            "memories at the tail leave every whole chunk before them in use",
            bool(tail) and not late,
            f"{len(tail) - len(late)} of {len(tail)} turns without an archiving",
        ),
    )


def figures(turns: Sequence[Taken]) -> Figures:
    """Return what the turns of a conversation come to; the first one's time aside."""
    return Figures(
        sum(each.injected_tokens for each in turns),
        sum(each.repeated_tokens for each in turns),
        sum(each.doubled_tokens for each in turns),
        sum(each.is_missed for each in turns),
        sum(each.is_archived for each in turns),
        statistics.fmean(each.prompt_tokens for each in turns),
        statistics.fmean(each.reused_tokens for each in turns),
        statistics.median(each.first_token_s for each in turns[1:]) * 1e3,
    )


def _talked(
    config: Config, prose: Prose, root: pathlib.Path
) -> dict[str, tuple[Taken, ...]]:
    """Take every turn under every policy before the next one; return what each took."""
    model, loaded = tiny_decoder.load(config.model)
    store = StoreConfig(
        str(root / "pages"), config.chunk_tokens, max_nbytes=config.store_nbytes
    )
    served = Served(model=model, pool=config.pool, serve=config.serve, store=store)
    engine = served.engine(loaded)
    engine.warm_up()
    with Conversations(engine, SessionStore.open(root / "sessions")) as conversations:
        talks = {
            f"{place}_{name}": Talk(conversations, place, name, config)
            for place in _PLACES
            for name in ("never", "messages", "turns", "tokens", "resident")
        }
        for talk in talks.values():
            talk.remember(prose)
        for question in prose.questions:
            for talk in talks.values():
                talk.take(question)
        return {name: tuple(talk.taken) for name, talk in talks.items()}


class Talk:
    """One conversation, of a user of its own so that it shares no page with another."""

    def __init__(
        self, conversations: Conversations, place: str, name: str, config: Config
    ):
        """Open it, with memories in a place and the policy of a name."""
        self._me = conversations.sessions.principal("lab", f"{place}-{name}")
        self._session = self._me.session("talk")
        self._config = config
        policy = _policy(name, config, conversations, self._me)
        self._options = Options(
            SamplingParams(max_tokens=config.max_tokens),
            _SYSTEM,
            place,
            policy,
            config.recalled,
        )
        self._talk = conversations.open(self._session, options=self._options)
        self._seen: set[str] = set()  # memories that stood in some prompt
        self._length = 0
        self.taken: list[Taken] = []

    def remember(self, prose: Prose) -> None:
        """Keep the memories, and their texts to look for them."""
        self._texts = dict(prose.memories)
        for uri, text in prose.memories.items():
            self._me.remember(text, uri)

    def take(self, question: Question) -> Taken:
        """Take one turn, archiving first what makes the transcript too long."""
        is_archived = self._length > self._config.longest
        if is_archived:
            self._session.commit(keep=self._config.keep)
        found = self._me.recall(question.text, limit=self._config.recalled)
        reply = self._talk.say(question.text)
        output = reply.output
        self._length = len(output.prompt_ids) + len(output.output_ids)
        done = self._measured(reply, question, is_archived)
        if question.uri not in {each.uri for each in found.entries}:
            done = dataclasses.replace(done, is_missed=False)  # not by a cooldown
        self.taken.append(done)
        return done

    def _measured(self, reply: Reply, question: Question, is_archived: bool) -> Taken:
        engine = self._talk.engine
        said = engine.tokenizer.decode(reply.output.prompt_ids)
        entries = reply.recall.entries
        nums = {e.uri: _num_tokens(engine, e.text) for e in entries}
        doubled = {e.uri for e in entries if said.count(e.text) > 1}
        repeated = self._seen & nums.keys()
        self._seen |= nums.keys()
        is_compared = len(self.taken) % self._config.verify_every == 1
        return Taken(
            reply.resume.num_prompt,
            reply.resume.num_reused,
            reply.resume.num_expected,
            sum(nums.values()),
            sum(nums[uri] for uri in repeated),
            sum(nums[uri] for uri in doubled),
            reply.recall.excluded,
            self._texts[question.uri] not in said,
            is_archived,
            reply.output.first_token_s,
            self._is_same(reply) if is_compared else None,
        )

    def _is_same(self, reply: Reply) -> bool:
        """Say whether a prefill of all of it, beside every page, answers the same."""
        output, engine = reply.output, self._talk.engine
        nobody = Identity(salt=f"prefill {self._me.user} {len(self.taken)}".encode())
        with _without_store(engine):
            (whole,) = engine.generate(
                [output.prompt_ids], self._options.sampling, nobody
            )
        assert whole.cached_tokens == whole.stored_tokens == 0
        return whole.output_ids == output.output_ids


def _policy(
    name: str, config: Config, conversations: Conversations, me: Principal
) -> Cooldown:
    made = {
        "never": lambda: sessions.messages(0),
        "messages": lambda: sessions.messages(config.cool_messages),
        "turns": lambda: sessions.turns(config.cool_turns),
        "tokens": lambda: sessions.tokens(config.cool_tokens),
        "resident": lambda: conversations.resident(me),
    }
    return made[name]()


def _num_tokens(engine: Engine, text: str) -> int:
    return len(engine.tokenizer.encode(text, add_special_tokens=False))


@contextlib.contextmanager
def _without_store(engine: Engine) -> Iterator[None]:
    """Let an engine neither find nor keep anything in its page store."""
    store, engine.recall = engine.recall, None
    try:
        yield
    finally:
        engine.recall = store
