"""Builders of this room's tests: sessions and tiny engines over one page store."""

import contextlib
import dataclasses
import functools

import pytest

from experiments import tiny_decoder
from kvmem import config as configs
from kvmem.config import ModelConfig, PoolConfig, StoreConfig
from kvmem.conversation import Chain, Conversations, Options
from kvmem.geometry import Topology
from kvmem.serve import SamplingParams, ServeConfig
from kvmem.serve import loop as loops
from kvmem.session import SessionStore

CHUNK = 16


@pytest.fixture
def short() -> Options:
    """Replies of ten tokens, and nothing recalled."""
    return Options(SamplingParams(max_tokens=10, ignore_eos=True), memories=0)


@pytest.fixture
def chain_of():
    """Return `chain_of(session, actor)`: the manifest that is kept now."""

    def chain_of(session, actor=None) -> Chain:
        blob, _ = session.chains.get(actor)
        return Chain.decode(blob)

    return chain_of


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A decoder whose tokens are bytes, with its config."""
    folder = tiny_decoder.write(tmp_path_factory.mktemp("tiny"))
    return tiny_decoder.load(ModelConfig(str(folder), kv_dtype="float32"))


@pytest.fixture(scope="session")
def shared_steps():
    """Steps compiled once for all engines of this room."""
    return functools.cache(loops.Stepper)


@pytest.fixture
def make_engine(tiny_model, shared_steps, tmp_path, monkeypatch):
    """Return `make(tp)`: an engine over the test's page store, its only writer."""
    monkeypatch.setattr(loops, "Stepper", shared_steps)
    model, loaded = tiny_model
    serve = ServeConfig(
        max_batch=2, max_length=768, prefill_chunk=256, chunks=(256,), widths=(768,)
    )
    with contextlib.ExitStack() as closing:
        opened = []

        def make(tp: int = 1, page_size: int = 16, loaded=loaded, **store):
            while opened:  # one process at a time
                opened.pop().close()
            config = configs.Config(
                model=model,
                topology=Topology(tp=tp),
                pool=PoolConfig(page_size=page_size, pages=256),
                serve=serve,
                store=StoreConfig(str(tmp_path / "pages"), chunk_tokens=CHUNK, **store),
            )
            engine = config.engine(loaded)
            opened.append(engine.recall.store)
            return engine

        yield make
        for store in opened:
            closing.callback(store.close)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture
def start(make_engine, root):
    """Return `start(...)`: what a new process sees: conversations, and a principal."""

    def start(user: str = "ann", **engine) -> tuple[Conversations, object]:
        sessions = SessionStore.open(root)
        made = Conversations(make_engine(**engine), sessions)
        return made, sessions.principal("lab", user)

    return start


@pytest.fixture
def asking(start, short):
    """Return `asking(...)`: conversations, their principal, and a talk that recalls."""

    def asking(**options):
        conversations, me = start()
        me.remember("tea at ten", "memories/tea")
        options = dataclasses.replace(short, memories=1, **options)
        return conversations, me, conversations.open(me.session("s"), options=options)

    return asking
