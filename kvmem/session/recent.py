"""Recent recalls: what this process answered, for messages that carry it by its id.

The law: an id means the same whether a recall was recorded, had no session, or could
not be recorded; and it means the recall of the session that it was asked for, or one
that was asked for none. In this process a user's last thousand can be carried, whatever
other users ask. Another process knows those that a ledger keeps: with a request id of
the caller's, or marked at the append.

    recent.note(("lab", "ann"), "s1", found)
    recent.get(("lab", "ann"), "s1", found.id)
"""

import threading
from collections import OrderedDict

from kvmem.session.asking import Recall

MAX_RECALLS = 1000  # of one user
MAX_IN_ALL = 20_000  # beyond it, whoever has most forgets
Owner = tuple[str, str]  # account, user
_Recalls = OrderedDict[tuple[str | None, str], Recall]  # by session and id


class Recent:
    """The last recalls of a store, by their users, sessions and ids."""

    def __init__(self):
        """Know none."""
        self._recalls: dict[Owner, _Recalls] = {}
        self._count = 0
        self._lock = threading.Lock()

    def note(self, owner: Owner, session: str | None, found: Recall) -> None:
        """Remember a recall; the user's oldest is forgotten for it."""
        with self._lock:
            mine = self._recalls.setdefault(owner, OrderedDict())
            self._count += (session, found.id) not in mine
            mine[session, found.id] = found
            if len(mine) > MAX_RECALLS:
                self._drop_oldest(owner)
            if self._count > MAX_IN_ALL:
                self._drop_oldest(max(self._recalls, key=self._num_of))

    def get(self, owner: Owner, session: str, id: str) -> Recall | None:
        """Return a user's recall of that id for a session, if it is known here."""
        with self._lock:
            mine = self._recalls.get(owner, {})
            return mine.get((session, id)) or mine.get((None, id))

    def forget(self, owner: Owner) -> None:
        """Forget a user's recalls: a memory in one of them is to be nowhere."""
        with self._lock:
            self._count -= len(self._recalls.pop(owner, ()))

    def _num_of(self, owner: Owner) -> int:
        return len(self._recalls[owner])

    def _drop_oldest(self, owner: Owner) -> None:
        self._recalls[owner].popitem(last=False)
        self._count -= 1
