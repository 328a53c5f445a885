"""What the user of `session_memory` remembers and asks: prose drawn from a seed.

Twenty things that are kept somewhere, and questions about them. A subject is stayed
with for a while or changed, some come up often and some never, and around each question
stands small talk of a length of its own, so that nothing in the turns repeats.

    prose = Prose.draw(memories=20, turns=100, seed=0)
    prose.memories["things/0"], prose.questions[0].text
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

__all__ = ["MOST_MEMORIES", "Prose", "Question"]

_WHO = (
    "Amara Boris Chiara Dmitri Elena Farid Greta Hiro Ingrid Jamal Keiko Lorenzo Maren "
    "Nadia Oskar Priya Quentin Rosa Sofia Tomas"
).split()
_WHAT = (
    "violin telescope ledger compass umbrella typewriter lantern chessboard globe "
    "tripod kettle saddle microscope accordion sextant easel barometer loom harp anvil"
).split()
_WHERE = (
    "attic cellar pantry garage greenhouse chapel library workshop stable boathouse "
    "lighthouse mill bakery station museum tavern school theatre harbour tower"
).split()
_TALK = (
    "rain came early today so we walked home along a narrow road past two farms while "
    "dogs barked and someone sang about summer wind my tea went cold again before noon "
    "yesterday nobody called but three letters arrived with odd stamps from far islands"
).split()
MOST_MEMORIES = len(_WHO)


@dataclasses.dataclass(frozen=True)
class Question:
    """What the user says in one turn, and the memory that answers it."""

    text: str
    uri: str


@dataclasses.dataclass(frozen=True)
class Prose:
    """Memories by uri, and the questions of all turns."""

    memories: Mapping[str, str]
    questions: Sequence[Question]

    @classmethod
    def draw(cls, memories: int, turns: int, seed: int, stay: float = 0.5) -> "Prose":
        """Draw it.

        Args:
            memories: how many there are.
            turns: how many questions.
            seed: of all of it.
            stay: the chance that a question is about what the last one was about.
        """
        rng = random.Random(seed)
        columns = [rng.sample(words, memories) for words in (_WHO, _WHAT, _WHERE)]
        things = list(zip(*columns, strict=True))
        kept = {
            f"things/{at}": f"{who} keeps a {what} in the old {where}."
            for at, (who, what, where) in enumerate(things)
        }
        weights = [1 / (rank + 2) for rank in range(memories)]  # some come up often
        asked, about = [], 0
        for turn in range(turns):
            if not turn or rng.random() >= stay:
                (about,) = rng.choices(range(memories), weights)
            who, what, _ = things[about]
            asked.append(Question(_asked(rng, who, what), f"things/{about}"))
        return cls(kept, tuple(asked))


def _asked(rng: random.Random, who: str, what: str) -> str:
    """Return small talk and a question."""
    talk = " ".join(rng.choices(_TALK, k=rng.randint(2, 7))).capitalize()
    question = rng.choice(
        (
            f"Where would {who} look for that {what}?",
            f"What of {who} and a {what}, do you know?",
            f"And where might {who} have put a {what}?",
        )
    )
    return f"{talk}. {question}"
