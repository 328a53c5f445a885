"""An engine answers LangChain's messages, and actors of one user stay apart."""

import concurrent.futures

import pytest

from kvmem.serve import SamplingParams

pytest.importorskip("langchain", reason="the extra langgraph is not installed")
from langchain.agents import create_agent  # noqa: E402
from langchain_core.messages import HumanMessage, SystemMessage  # noqa: E402

from kvmem.conversation.chat_model import ChatModel  # noqa: E402
from kvmem.session.middleware import SessionMiddleware  # noqa: E402


@pytest.fixture
def model(make_engine):
    return ChatModel(
        engine=make_engine(), sampling=SamplingParams(max_tokens=6, ignore_eos=True)
    )


def test_a_reply_is_the_engines_own(model):
    said = [SystemMessage("be brief"), HumanMessage("hello, you there")]
    reply = model.invoke(said)
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello, you there"},
    ]
    ids = model.engine.tokenizer.apply_chat(chat)
    (output,) = model.engine.generate([ids], model.sampling)
    assert reply.text == output.text
    assert reply.usage_metadata["input_tokens"] == len(ids)
    again = model.invoke(said)
    assert again.response_metadata["cached_tokens"] >= 16


def test_models_share_pages_where_they_are_given_one_identity(model):
    said, mine = [HumanMessage("hello, you there, in the garden")], model.identity
    model.invoke(said)
    given = {"engine": model.engine, "sampling": model.sampling}
    other = ChatModel(**given).invoke(said).response_metadata
    assert (other["cached_tokens"], other["stored_tokens"]) == (0, 0)
    twin = ChatModel(**given, identity=mine).invoke(said).response_metadata
    assert twin["cached_tokens"] >= 16


def test_what_it_does_not_do_is_refused(model):
    with pytest.raises(ValueError, match="calls no tools"):
        model.invoke([HumanMessage("hi")], tools=[])


def test_two_actors_of_one_user_run_side_by_side(model, start):
    conversations, me = start()
    model = ChatModel(engine=conversations.engine, sampling=model.sampling)

    def run(actor: str) -> None:
        with me.acting_as(actor):
            me.remember(f"the {actor} likes its own color", peer=actor)
            agent = create_agent(model, tools=[], middleware=[SessionMiddleware(me)])
            for text in (f"{actor}: what color do I like?", "and what else?"):
                agent.invoke(
                    {"messages": [{"role": "user", "content": text}]},
                    {"configurable": {"thread_id": f"s-{actor}"}},
                )

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, name) for name in ("planner", "critic")]:
            done.result()
    for mine, other in (("planner", "critic"), ("critic", "planner")):
        texts = [m.text for m in me.session(f"s-{mine}").messages()]
        assert len(texts) == 4
        assert any(mine in text for text in texts)
        assert not any(other in text for text in texts)
