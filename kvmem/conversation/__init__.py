"""Conversations: sessions with their KV, resumed in any process and on any topology.

    engine = config.load("chat.toml").engine()          # with a page store of its own
    sessions = SessionStore.open("runs/chat/sessions")
    conversations = Conversations(engine, sessions)
    talk = conversations.open(sessions.principal("lab", "ann").session("s1"))
    print(talk.say("Hello!").text)

The law: what was computed is found again by the very tokens that were fed, and every
doubt costs a prefill, with a reason, and never another answer.
"""

from kvmem.conversation.chain import Chain, Facts, Span
from kvmem.conversation.conversation import Conversation, Options, Reply
from kvmem.conversation.conversations import Conversations
from kvmem.conversation.resume import Resume

__all__ = [
    "Chain",
    "Conversation",
    "Conversations",
    "Facts",
    "Options",
    "Reply",
    "Resume",
    "Span",
]
