"""Drafting: tokens are proposed, and the model verifies several of them in one step.

Who proposes is a draft: frozen facts that an engine starts (`protocol`). One file a
kind: `ngram` looks the text up in itself; `two_engine` runs a smaller model on a pool
of its own (`own_pages`, `chain`); `frozen_kv` runs the model's first layers on the
model's own pages, in one chain or in several (`trees`); `mtp` runs layers of its own
on the model's hidden rows, as groups of the model's own pool, and `dspark` the same on
the pool's virtual ids; `dflash` proposes a block at once behind the model's rows, which
it keeps on virtual ids too (`virtual`).

The law of all: an engine emits the tokens that it would emit without a draft (`judge`:
a drafted token stands if it equals the choice for its place; where it was drawn with
its probabilities, by exact rejection instead), and afterwards its pages, states and
prefix cache are those that the emitted tokens alone would have left (`verifier`,
`room`, `wipe`).

    engine = Engine(model, groups, solved, draft=NGram(draft_tokens=4))
    engine.generate("a b c d a b")
    engine.stats().drafting.tokens_per_step

A new kind of draft is a frozen dataclass with `groups` and `start(target)`, and a
proposer of the protocol's verbs; `Forgetful` answers all but `propose`. What the target
has of memory is reached through `target.pool`, `target.table` and each sequence's
`held`. What it keeps in pages of its own travels with the target's records if it says
how (`kvmem.serve.travel`), and is refused beside a store if it does not.
"""

from kvmem.serve.draft.counts import DraftStats
from kvmem.serve.draft.dflash import DFlash
from kvmem.serve.draft.dspark import DSpark
from kvmem.serve.draft.frozen_kv import FrozenKV
from kvmem.serve.draft.mtp import MTP
from kvmem.serve.draft.ngram import NGram
from kvmem.serve.draft.two_engine import TwoEngine

__all__ = ["MTP", "DFlash", "DSpark", "DraftStats", "FrozenKV", "NGram", "TwoEngine"]
