"""An engine as a chat model of LangChain: for agents that run where their KV is.

    model = ChatModel(engine=engine, sampling=SamplingParams(max_tokens=128))
    agent = create_agent(model, tools=[], middleware=[SessionMiddleware(me)])

The law: messages become text by the checkpoint's own template, and what the engine
reused of them is in `response_metadata`. One engine serves one call at a time; calls of
several threads wait for each other. Two models share no pages unless they are given one
identity. Needs the extra `langgraph`.

What is computed here is no session's chain: no forgetting reaches the pages that an
engine with a page store keeps of it, under whatever identity. A text that may have to
be forgotten is fed by `kvmem.conversation.Conversations`, or to an engine without one.
"""

import dataclasses
import secrets
import threading
from typing import Any

from kvmem import errors
from kvmem.serve import Engine, Identity, SamplingParams

try:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from pydantic import ConfigDict, Field, PrivateAttr
except ImportError as missing:
    raise ImportError(
        errors.say(
            "kvmem.conversation.chat_model",
            f"{missing.name} is not installed",
            'Install the extra: pip install "kvmem[langgraph]"',
        )
    ) from missing

__all__ = ["ChatModel"]

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def _of_this_model() -> Identity:
    """Return an identity that no other model has."""
    return Identity(salt=secrets.token_bytes(32))


class ChatModel(BaseChatModel):
    """A model that answers from one engine.

    Args:
        engine: whose model has a chat template.
        sampling: of replies.
        identity: whose texts these are; only equal identities share pages. Without one
            it is this model's own, and nothing is found again by another process:
            `Identity(salt=principal.salt())` is a user's, wherever.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    engine: Engine
    sampling: SamplingParams = SamplingParams(max_tokens=128)
    identity: Identity = Field(default_factory=_of_this_model)
    _turn: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "kvmem"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Answer a conversation."""
        if kwargs:
            raise errors.ConfigError(
                errors.say(
                    f"a call with {', '.join(sorted(kwargs))}",
                    "this model takes messages and stop texts, and calls no tools",
                    "Bind nothing to it",
                )
            )
        sampling = self.sampling
        if stop:
            both = (*sampling.stop, *stop)
            sampling = dataclasses.replace(sampling, stop=both)
        chat = [{"role": _ROLES[m.type], "content": m.text} for m in messages]
        with self._turn:
            ids = self.engine.tokenizer.apply_chat(chat)
            (output,) = self.engine.generate([ids], sampling, self.identity)
        message = AIMessage(
            output.text,
            response_metadata={
                "cached_tokens": output.cached_tokens,
                "stored_tokens": output.stored_tokens,
                "finish_reason": output.completions[0].finish_reason,
            },
            usage_metadata={
                "input_tokens": len(output.prompt_ids),
                "output_tokens": len(output.output_ids),
                "total_tokens": len(output.prompt_ids) + len(output.output_ids),
            },
        )
        return ChatResult(generations=[ChatGeneration(message=message)])
