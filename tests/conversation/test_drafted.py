"""A conversation whose engine drafts: what the draft keeps of it is resumed as well."""

import pytest

from kvmem import config as configs
from kvmem.config import PoolConfig, SpeculativeConfig, StoreConfig
from kvmem.conversation import Conversations
from kvmem.serve import ServeConfig
from kvmem.session import SessionStore

SERVE = ServeConfig(
    max_batch=2, max_length=768, prefill_chunk=256, chunks=(256,), widths=(768,)
)


@pytest.fixture
def drafted(tiny_model, tmp_path):
    """Return `drafted(algorithm, folder)`: what a new process sees of a folder."""

    def make(algorithm, folder):
        model, loaded = tiny_model
        root = tmp_path / folder
        engine = configs.Config(
            model=model,
            pool=PoolConfig(pages=256),
            serve=SERVE,
            store=StoreConfig(str(root / "pages")),
            speculative=SpeculativeConfig(algorithm, steps=3 if algorithm else None),
        ).engine(loaded)
        return engine, SessionStore.open(root / "sessions").principal("lab", "ann")

    return make


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["dspark", "mtp", "two_engine"])
def test_a_drafted_conversation_is_resumed_with_its_draft(drafted, short, algorithm):
    replies, drafts = [], []
    for each in (algorithm, None):
        said = []
        for text in ("The quick brown fox jumps over it.", "And then it sleeps."):
            engine, me = drafted(each, f"{each}")
            with engine, Conversations(engine, me.store) as conversations:
                talk = conversations.open(me.session("s"), options=short)
                reply = talk.say(text)
            said.append((reply.text, reply.output.output_ids))
            drafts.append(engine.stats().drafting)
        replies.append(said)
        assert reply.resume.reason is None and reply.resume.num_reused == 48
    assert replies[0] == replies[1]
    assert min(each.drafted for each in drafts[:2]) > 0
