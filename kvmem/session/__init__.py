"""Sessions: who said it, was it said already, and to whom.

    store = SessionStore.open("runs/sessions")
    me = store.principal("lab", "ann")
    session = me.session("s1")
    found = me.recall("which tea?", session=session, cooldown=messages(3))
    session.append([{"role": "user", "content": "…"}], key="turn-1", carries=[found])

The law: a message that was acknowledged is on the disk, once, in order, its user's
alone. The chain is first recall, session, messages, ledger, and the ledger is last:
recall fails open and says so, capture fails loud.
"""

from kvmem.session.append import Appended
from kvmem.session.asking import Entry, Recall
from kvmem.session.capture import Capture, Pushed
from kvmem.session.commit import Committed
from kvmem.session.cooldown import Cooldown, messages, resident, tokens, turns
from kvmem.session.io import OsIO, Step
from kvmem.session.item_rows import Item
from kvmem.session.message import Message
from kvmem.session.principal import Principal
from kvmem.session.search import Hit, Retriever
from kvmem.session.session import Session
from kvmem.session.store import SessionStore

__all__ = [
    "Appended",
    "Capture",
    "Committed",
    "Cooldown",
    "Entry",
    "Hit",
    "Item",
    "Message",
    "OsIO",
    "Principal",
    "Pushed",
    "Recall",
    "Retriever",
    "Session",
    "SessionStore",
    "Step",
    "messages",
    "resident",
    "tokens",
    "turns",
]
