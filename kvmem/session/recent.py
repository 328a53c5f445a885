"""Recent recalls: what this process answered, for messages that carry it by its id.

The law: an id means the same whether a recall was recorded, had no session, or could
not be recorded; in this process every one of the last thousand can be carried. Another
process knows those that a ledger keeps: with a request id of the caller's, or marked at
the append.

    recent.note(("lab", "ann"), found)
    recent.get(("lab", "ann"), found.id)
"""

import threading
from collections import OrderedDict

from kvmem.session.asking import Recall

MAX_RECALLS = 1000
Owner = tuple[str, str]  # account, user


class Recent:
    """The last recalls of a store, by their users and ids."""

    def __init__(self):
        """Know none."""
        self._recalls: OrderedDict[tuple[Owner, str], Recall] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, owner: Owner, found: Recall) -> None:
        """Remember a recall; the oldest is forgotten for it."""
        with self._lock:
            self._recalls[owner, found.id] = found
            if len(self._recalls) > MAX_RECALLS:
                self._recalls.popitem(last=False)

    def get(self, owner: Owner, id: str) -> Recall | None:
        """Return a user's recall of that id, if it is known here."""
        return self._recalls.get((owner, id))

    def forget(self, owner: Owner) -> None:
        """Forget a user's recalls: a memory in one of them is to be nowhere."""
        with self._lock:
            for key in [key for key in self._recalls if key[0] == owner]:
                del self._recalls[key]
