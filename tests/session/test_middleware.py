"""Agents with memory: real LangChain agents, and a model that keeps what it gets."""

import asyncio
import contextlib
import dataclasses
import types

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from kvmem import errors
from kvmem.session import Hit, SessionStore, middleware
from kvmem.session.middleware import SessionMiddleware


class Scripted(BaseChatModel):
    """A model that answers from a list, else "answer N", and keeps what it gets."""

    given: list = []  # noqa: RUF012 -- pydantic copies it
    answers: list = []  # noqa: RUF012

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.given.append([(m.type, m.text) for m in messages])
        answer = self.answers.pop(0) if self.answers else f"answer {len(self.given)}"
        message = answer if isinstance(answer, AIMessage) else AIMessage(answer)
        return ChatResult(generations=[ChatGeneration(message=message)])


def agent_of(transport, model=None, tools=(), context=None, **how):
    return create_agent(
        model or Scripted(),
        list(tools),
        middleware=[SessionMiddleware(transport, **how)],
        checkpointer=InMemorySaver(),
        context_schema=context,
    )


def ask(agent, text, thread="s", **more):
    config = {"configurable": {"thread_id": thread}}
    return agent.invoke({"messages": [HumanMessage(text)]}, config, **more)


def parts(me, session="s"):
    """Return (role, kinds of parts, what was said) of a session's messages."""
    return [
        (m.role, tuple(p["type"] for p in m.parts), m.said)
        for m in me.session(session).messages()
    ]


@pytest.fixture(params=["process", "http"])
def user(request, me):
    if request.param == "process":
        return me
    return request.getfixturevalue("served").client("lab", "ann")


@pytest.mark.case("SES-23")
def test_memories_stand_at_the_end_of_the_users_message_and_stay_there(user):
    user.remember("Ann takes her tea green.", "memories/tea")
    model = Scripted()
    agent = agent_of(user, model)
    ask(agent, "What tea do I like?")
    ask(agent, "Thanks, and my tea?")
    first, second = model.given
    assert second[: len(first)] == first  # append-only: what was given is given again
    ((_, text),) = first
    assert text.startswith("What tea do I like?")
    assert text.endswith("<memories>\n- Ann takes her tea green.\n</memories>")
    assert second[-1] == ("human", "Thanks, and my tea?")  # cooled: it is there above
    assert parts(user) == [
        ("user", ("text", "context"), "What tea do I like?"),
        ("assistant", ("text",), "answer 1"),
        ("user", ("text",), "Thanks, and my tea?"),
        ("assistant", ("text",), "answer 2"),
    ]


@pytest.mark.case("SES-07")
def test_what_was_recalled_is_not_extracted_again(me):
    me.remember("Ann takes her tea green.")
    ask(agent_of(me), "What tea do I like?")
    handed = []

    def echo(messages):
        handed.extend(message.text for message in messages)
        return handed

    me.session("s").commit(extract=echo)
    assert handed == ["What tea do I like?", "answer 1"]
    assert sum("green" in item.text for item in me.items.list()) == 1


def test_a_restarted_agent_captures_what_is_new(me, store):
    saver = InMemorySaver()

    def agent(me):
        how = {"middleware": [SessionMiddleware(me)], "checkpointer": saver}
        return create_agent(Scripted(), [], **how)

    ask(agent(me), "one")
    again = SessionStore.open(store.root).principal("lab", "ann")
    ask(agent(again), "two")
    assert [said for _, _, said in parts(me)] == ["one", "answer 1", "two", "answer 1"]


def test_tools_are_captured_and_memories_asked_for_once_a_message(me):
    @tool
    def kettle(degrees: int) -> str:
        """Boil water."""
        return f"{degrees} degrees"

    me.remember("Ann takes her tea green.")
    call = {"name": "kettle", "args": {"degrees": 80}, "id": "c1", "type": "tool_call"}
    model = Scripted(answers=[AIMessage("", tool_calls=[call])])
    ask(agent_of(me, model, [kettle]), "Make my tea")
    assert [role for role, _, _ in parts(me)] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    called, result = me.session("s").messages()[1:3]
    assert called.parts[0]["args"] == {"degrees": 80}
    assert (result.parts[0]["id"], result.parts[0]["text"]) == ("c1", "80 degrees")
    assert len(me.session("s").ledger()) == 1


@dataclasses.dataclass
class Context:
    actor: str
    roles: list


def test_two_actors_beside_each_other_have_their_own_cursors_and_ledgers(user, me):
    for actor in ("A", "B"):
        user.remember(f"Tea of {actor} is green.", f"peers/{actor}/memories/tea")
    model, seen = Scripted(), []

    def resolver(server):
        seen.append(server)
        return server.context["actor"]

    agent = agent_of(
        user, model, context=Context, actor_resolver=resolver,
        session_resolver=lambda run: "shared",
    )  # fmt: skip

    async def run():
        async def talk(actor):
            for i in range(3):
                await agent.ainvoke(
                    {"messages": [HumanMessage(f"tea {i} of {actor}")]},
                    {"configurable": {"thread_id": f"thread-{actor}"}},
                    context=Context(actor, ["x"]),
                )

        await asyncio.gather(talk("A"), talk("B"))

    asyncio.run(run())
    captured = user.session("shared").messages()
    for actor in ("A", "B"):
        mine = [m for m in captured if m.actor == actor]
        assert [m.said for m in mine][::2] == [f"tea {i} of {actor}" for i in range(3)]
        served = [p["uri"] for m in mine for p in m.parts if p["type"] == "context"]
        assert set(served) == {f"peers/{actor}/memories/tea"}
    assert len(captured) == 12
    for given in model.given:
        texts = " ".join(text for _, text in given)
        assert ("Tea of A" in texts) + ("Tea of B" in texts) == 1
    assert not hasattr(seen[0], "state") and not hasattr(seen[0], "thread_id")
    assert seen[0].context["roles"] == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].user = "bob"
    with pytest.raises(TypeError):
        seen[0].context["actor"] = "B"


def test_behind_a_server_a_resolver_is_told_who_asks_and_no_context():
    user = types.SimpleNamespace(identity="ann", permissions=["read"])
    server = types.SimpleNamespace(user=user, assistant_id="a1", graph_id="g1")
    run = types.SimpleNamespace(thread_id="t1", run_id="r1")
    runtime = types.SimpleNamespace(
        server_info=server, execution_info=run, context={"actor": "root"}
    )
    facts = middleware._server_runtime(runtime)
    assert (facts.user, facts.permissions, facts.assistant_id) == (
        "ann",
        ("read",),
        "a1",
    )
    assert dict(facts.context) == {}
    assert middleware._run_facts(runtime).thread_id == "t1"


@pytest.mark.parametrize(
    ("resolver", "expected"),
    [(None, "X"), (lambda _: None, None), (lambda _: "Y", "Y")],
)
def test_a_scope_around_the_run_holds_unless_a_resolver_answers(me, resolver, expected):
    with me.acting_as("X"):
        ask(agent_of(me, actor_resolver=resolver), "hello")
    assert {m.actor for m in me.session("s").messages()} == {expected}


def test_a_required_actor_that_is_missing_is_loud(store):
    me = store.principal("lab", "ann", require_actor=True)
    with pytest.raises(errors.ActorRequired):
        ask(agent_of(me), "hello")


def test_what_cannot_carry_an_actor_is_refused_at_construction(me, monkeypatch):
    silent = types.SimpleNamespace(recall=me.recall)
    with pytest.raises(ValueError, match="supports_request_actor_peer"):
        SessionMiddleware(silent, actor_resolver=lambda _: None)
    SessionMiddleware(silent)
    old = dataclasses.make_dataclass("Runtime", ["context", "store"])
    monkeypatch.setattr(middleware, "Runtime", old)
    with pytest.raises(ImportError, match="newer langgraph"):
        SessionMiddleware(me, actor_resolver=lambda _: None)
    SessionMiddleware(me)


def test_recall_fails_open_and_capture_fails_loud(me):
    class Broken:
        supports_request_actor_peer = True
        actor, session, acting_as = None, me.session, me.acting_as
        captured = me.captured

        def recall(self, *args, **kwargs):
            raise TimeoutError("no service")

        def capture(self, *args):
            raise TimeoutError("no service")

    model = Scripted()
    with pytest.raises(TimeoutError):
        ask(agent_of(Broken(), model), "hello")
    assert model.given == [[("human", "hello")]]


def test_a_thread_is_needed_or_a_resolver_of_sessions(me):
    agent = create_agent(Scripted(), [], middleware=[SessionMiddleware(me)])
    with pytest.raises(errors.ConfigError, match="session_resolver"):
        agent.invoke({"messages": [HumanMessage("hello")]})


def test_a_message_of_blocks_keeps_its_blocks(me):
    me.remember("Ann takes her tea green.")
    model = Scripted()
    agent = agent_of(me, model)
    blocks = [{"type": "text", "text": "my tea?"}, {"type": "image", "url": "x"}]
    with contextlib.suppress(NotImplementedError):
        agent.invoke(
            {"messages": [HumanMessage(content=blocks)]},
            {"configurable": {"thread_id": "s"}},
        )
    (said, kinds, _), *_ = parts(me)
    assert (said, kinds) == ("user", ("text", "image", "context"))
    assert "green" in model.given[0][0][1]


def put_in(me, content="my tea?"):
    """Return a user's message with a memory in it."""
    me.remember("Ann takes her tea green.", "memories/tea")
    one = SessionMiddleware(me, session_resolver=lambda _: "s")
    state = {"messages": [HumanMessage(content=content, id="m1")]}
    (message,) = one.before_model(state, types.SimpleNamespace(context=None))[
        "messages"
    ]
    return message


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text, "my tea?"),
        (lambda text: f"[10:00 UTC] {text}", "[10:00 UTC] my tea?"),
        (lambda text: f"{text} [end]", "my tea? [end]"),
        (lambda text: f"{text[len('my tea?'):]} {text}",
         "\n\n<memories>\n- Ann takes her tea green.\n</memories> my tea?"),
        (lambda text: [{"type": "text", "text": text}], "my tea?"),
    ],
)  # fmt: skip
def test_memories_are_told_apart_however_others_edited_the_message(me, edit, said):
    message = put_in(me)
    kept = message.model_copy(update={"content": edit(message.content)})
    first, memory = middleware.plain(kept)["parts"]
    assert (first if isinstance(first, str) else first["text"]) == said
    assert (memory["type"], memory["uri"]) == ("context", "memories/tea")


@pytest.mark.parametrize("content", ["my tea?", [{"type": "text", "text": "my tea?"}]])
def test_a_message_out_of_which_others_took_the_memories_holds_none(me, content):
    message = put_in(me, content)
    edited = message.model_copy(update={"content": content})
    assert middleware.plain(message)["parts"][0] == middleware.plain(edited)["parts"][0]
    assert [middleware.plain(each)["parts"][1:] for each in (edited,)] == [[]]


def test_what_is_forgotten_while_an_agent_runs_is_not_captured(user, me, request):
    user.remember("Ann's zebrafinch sings.", "memories/finch")

    class Forgetting(Scripted):
        def _generate(self, messages, **kwargs):
            user.forget("memories/finch")
            return super()._generate(messages, **kwargs)

    model = Forgetting()
    ask(agent_of(user, model), "How is my zebrafinch?")
    assert "sings" in model.given[0][0][1]
    assert parts(user)[0] == ("user", ("text", "context"), "How is my zebrafinch?")
    store = me.store if user is me else request.getfixturevalue("served").store
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"finch sings" in path.read_bytes()]


def test_a_kind_of_message_that_no_conversation_has_is_refused():
    class Odd(HumanMessage):
        type: str = "odd"

    with pytest.raises(errors.ConfigError, match="odd"):
        middleware.plain(Odd("x"))


def test_a_resumed_run_is_given_the_same_memories(tmp_path, told):
    store = SessionStore.open(tmp_path, retriever=told("memories/tea"))
    me = store.principal("lab", "ann")
    store.retriever.hits = [Hit("memories/tea", "green", 0.5)]
    one = SessionMiddleware(me, session_resolver=lambda _: "s")
    state = {"messages": [HumanMessage("tea?", id="m1")]}
    runtime = types.SimpleNamespace(context=None)
    first, again = one.before_model(state, runtime), one.before_model(state, runtime)
    assert first == again and "green" in first["messages"][0].text
    assert one.before_model(first, runtime) is None  # they are there already
