"""Memory for LangChain agents: recall before the model is called, capture after it.

    agent = create_agent(model, tools, middleware=[SessionMiddleware(me)])
    agent.invoke({"messages": [...]}, {"configurable": {"thread_id": "s1"}})

Memories are put at the end of the user's own message, and stay there: the state holds
what the model was given, so a KV chain over it is only ever appended to. The law: who
acts is said by the server's own facts. The resolver of the actor is given a frozen
`ServerRuntime`, which has no state of the model and nothing that a client set; and each
(actor, session, peer) has its own cursor and ledger, so that agents of one user may run
beside each other.

Recall fails open: an agent goes on without memories. Capture fails loud. Needs the
extra `langgraph`.
"""

import asyncio
import copy
import dataclasses
import hashlib
import json
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvmem import errors
from kvmem.session.asking import Recall
from kvmem.session.capture import Capture, Transport
from kvmem.session.cooldown import Cooldown, messages

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.messages import AnyMessage, HumanMessage
    from langgraph.runtime import Runtime
except ImportError as missing:
    raise ImportError(
        errors.say(
            "kvmem.session.middleware",
            f"{missing.name} is not installed",
            'Install the extra: pip install "kvmem[langgraph]"',
        )
    ) from missing

__all__ = ["RunFacts", "ServerRuntime", "SessionMiddleware", "plain"]

_KEY = "kvmem"  # of a message's additional_kwargs: what was put into it
_ROLES = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
_NEEDS = ("server_info", "execution_info")  # fields of a runtime that says who asks
_logger = logging.getLogger("kvmem.session")


@dataclasses.dataclass(frozen=True)
class ServerRuntime:
    """What a server itself knows of a run; all that a resolver of actors is given."""

    user: str | None = None  # identity of the authenticated user
    permissions: tuple[str, ...] = ()
    assistant_id: str | None = None
    graph_id: str | None = None
    # What the program that runs the agent passed as context, read-only; empty behind a
    # LangGraph server, where a client chooses it.
    context: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )


@dataclasses.dataclass(frozen=True)
class RunFacts(ServerRuntime):
    """What a resolver of sessions is given: also which run of which thread it is."""

    thread_id: str | None = None
    run_id: str | None = None


class SessionMiddleware(AgentMiddleware):
    """Gives an agent the memory of one user.

    Args:
        transport: a principal of this process, or a `kvmem.session.client.Client`.
        actor_resolver: called with a `ServerRuntime`, returns the actor of the calls or
            None; without one the scope around the agent's run holds.
        session_resolver: called with `RunFacts`, returns the session's id; without one
            it is the thread's id.
        peer: whom the conversation is with.
        cooldown: for how long a memory that was served is held back.
        limit: of memories for one message.

    Raises:
        ImportError: there is an `actor_resolver`, and this langgraph's runtime does not
            say who asks.
        ValueError: there is one, and the transport carries no actor.
    """

    def __init__(
        self,
        transport: Transport,
        actor_resolver: Callable[[ServerRuntime], str | None] | None = None,
        session_resolver: Callable[[RunFacts], str] | None = None,
        peer: str | None = None,
        cooldown: Cooldown = messages(3),  # noqa: B008 -- frozen
        limit: int = 8,
    ):
        super().__init__()
        if actor_resolver is not None:
            _require_server_facts(Runtime)
        self._transport = transport
        self._capture = Capture(transport, actor_resolver, None, peer)
        self._session_resolver = session_resolver or _thread_of
        self._cooldown, self._limit = cooldown, limit

    def before_model(self, state: Any, runtime: Runtime) -> dict[str, Any] | None:
        """Put memories into the user's newest message, once."""
        last = state["messages"][-1] if state["messages"] else None
        if not isinstance(last, HumanMessage) or _KEY in last.additional_kwargs:
            return None
        with self._capture.scope(_server_runtime(runtime)):
            found = self._recalled(last, self._session_resolver(_run_facts(runtime)))
        return {"messages": [_with_memories(last, found)]} if found else None

    def after_model(self, state: Any, runtime: Runtime) -> dict[str, Any] | None:
        """Capture what of the history is not captured yet."""
        session = self._session_resolver(_run_facts(runtime))
        history = [plain(message) for message in state["messages"]]
        self._capture.push(history, _server_runtime(runtime), session)

    async def abefore_model(
        self, state: Any, runtime: Runtime
    ) -> dict[str, Any] | None:
        """Do as `before_model` in a thread that has this task's context."""
        return await asyncio.to_thread(self.before_model, state, runtime)

    async def aafter_model(self, state: Any, runtime: Runtime) -> dict[str, Any] | None:
        """Do as `after_model` in a thread that has this task's context."""
        return await asyncio.to_thread(self.after_model, state, runtime)

    def _recalled(self, message: HumanMessage, session: str) -> Recall | None:
        """Return the memories for a message; what is wrong out there costs them only.

        The request's id follows from the message, so that a run that is resumed is
        given the same ones.
        """
        query, actor = message.text, self._transport.actor
        said = json.dumps([actor, message.id, query])
        try:
            found = self._transport.recall(
                query,
                session=self._transport.session(session),
                cooldown=self._cooldown,
                limit=self._limit,
                request_id=hashlib.sha256(said.encode()).hexdigest()[:32],
            )
        except (errors.ConfigError, errors.InvalidId, errors.Denied):
            raise  # nothing would be right until the program is changed
        except Exception as error:
            _logger.warning("an agent goes on without memories: %r", error)
            return None
        return found if found.entries else None


def plain(message: AnyMessage) -> dict[str, Any]:
    """Return an agent's message as sessions keep it: memories apart from what was said.

    Raises:
        ConfigError: it is of a kind that no conversation has.
    """
    if message.type not in _ROLES:
        law = f"a conversation has {', '.join(_ROLES)} messages"
        asked = f"capture of a {message.type} message"
        raise errors.ConfigError(errors.say(asked, law, "Leave it out of the state"))
    content = message.content
    parts = [content] if isinstance(content, str) else list(content)
    parts, memories = _apart(parts, message.additional_kwargs.get(_KEY))
    parts = [part for part in parts if part != ""]
    if message.type == "tool":
        parts = [_tool_result(message, parts)]
    parts += [_tool_call(call) for call in getattr(message, "tool_calls", ())]
    parts += [{"type": "context"} | memory for memory in memories]
    return {"id": message.id, "role": _ROLES[message.type], "parts": parts}


def _apart(parts: list, put_in: Mapping | None) -> tuple[list, Sequence[Mapping]]:
    """Return what was said of a message, and the memories that were put into it.

    Their frame is found by its words: others may have edited the message since, and
    where they took the frame out the message holds no memories.
    """
    if put_in is None:
        return parts, ()
    frame = _framed(put_in["memories"])
    for at in reversed(range(len(parts))):
        part = parts[at]
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str) or frame not in text:
            continue
        before, _, behind = text.rpartition(frame)
        text = before.removesuffix("\n\n") + behind
        left = text if isinstance(part, str) else {**part, "text": text}
        said = [left] if text else []
        return [*parts[:at], *said, *parts[at + 1 :]], put_in["memories"]
    return parts, ()


def _framed(memories: Sequence[Mapping]) -> str:
    lines = "\n".join(f"- {memory['text']}" for memory in memories)
    return f"<memories>\n{lines}\n</memories>"


def _with_memories(message: HumanMessage, found: Recall) -> HumanMessage:
    """Return the user's message, memories behind what was said, and a note of it."""
    content = message.content
    memories = [{"uri": entry.uri, "text": entry.text} for entry in found.entries]
    frame = _framed(memories)
    if isinstance(content, str):
        whole = f"{content}\n\n{frame}"
    else:
        whole = [*content, {"type": "text", "text": frame}]
    note = {"recall": found.id, "memories": memories}
    kwargs = message.additional_kwargs | {_KEY: note}
    return message.model_copy(update={"content": whole, "additional_kwargs": kwargs})


def _tool_call(call: Mapping) -> dict[str, Any]:
    return {
        "type": "tool_call",
        "id": call["id"],
        "name": call["name"],
        "args": call["args"],
    }


def _tool_result(message: Any, parts: Sequence) -> dict[str, Any]:
    texts = [part if isinstance(part, str) else part.get("text", "") for part in parts]
    return {
        "type": "tool_result",
        "id": message.tool_call_id,
        "status": message.status,
        "text": "\n".join(texts),
    }


def _server_runtime(runtime: Runtime) -> ServerRuntime:
    """Return the server's own facts of a run."""
    facts = _run_facts(runtime)
    names = [field.name for field in dataclasses.fields(ServerRuntime)]
    return ServerRuntime(**{name: getattr(facts, name) for name in names})


def _run_facts(runtime: Runtime) -> RunFacts:
    server = getattr(runtime, "server_info", None)
    run = getattr(runtime, "execution_info", None)
    user = getattr(server, "user", None)
    return RunFacts(
        user=getattr(user, "identity", None),
        permissions=tuple(getattr(user, "permissions", None) or ()),
        assistant_id=getattr(server, "assistant_id", None),
        graph_id=getattr(server, "graph_id", None),
        context=_frozen({} if server else _members(runtime.context)),
        thread_id=getattr(run, "thread_id", None),
        run_id=getattr(run, "run_id", None),
    )


def _members(context: Any) -> Mapping[str, Any]:
    """Return the members of a context, whatever kind it is; a plain value is one."""
    if context is None or isinstance(context, Mapping):
        return context or {}
    if dataclasses.is_dataclass(context):
        names = [field.name for field in dataclasses.fields(context)]
        return {name: getattr(context, name) for name in names}
    return getattr(context, "__dict__", None) or {"value": context}


def _frozen(value: Any) -> Any:
    """Return a copy that nobody can change."""
    if isinstance(value, Mapping):
        return types.MappingProxyType({k: _frozen(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return copy.deepcopy(value)


def _thread_of(facts: RunFacts) -> str:
    if facts.thread_id is None:
        asked, law = "an agent's run without a thread", "its session is the thread's"
        cure = "Give the agent a checkpointer and a thread_id, or a session_resolver"
        raise errors.ConfigError(errors.say(asked, law, cure))
    return facts.thread_id


def _require_server_facts(kind: type) -> None:
    """Raise ImportError for a langgraph whose runtime does not say who asks."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if not fields.issuperset(_NEEDS):
        law = "this langgraph's runtime does not say who asks"
        cure = "Install a newer langgraph, or leave the resolver out"
        raise ImportError(errors.say("an actor_resolver", law, cure))
