"""A cache that keeps each group to its share finds more of what chats said before."""

import random

import pytest

from kvmem import manage
from kvmem import pool as pools
from kvmem.budget import PoolPages
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import PrefixCache
from kvmem.serve.page_table import PageTable

PAGE, EXTENTS, PAGES = 16, 8, 500  # a state lies in eight pages
TYPICAL = EXTENTS / (EXTENTS + 1_000 / PAGE)  # beside the pages of a long chat


class Chats:
    """Twelve chats over a few system prompts, one turn of one of them after another."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.systems = [self.words(self.rng.randrange(40, 200)) for _ in range(4)]
        self.chats = [self.begun() for _ in range(12)]

    def words(self, count):
        return [self.rng.randrange(50_000) for _ in range(count)]

    def begun(self):
        return list(self.rng.choice(self.systems))

    def turn(self):
        """Return a chat that a person has just written in; a long one begins anew."""
        at = self.rng.randrange(12)
        if len(self.chats[at]) > 2_000:
            self.chats[at] = self.begun()
        self.chats[at] += self.words(self.rng.randrange(20, 100))
        return self.chats[at]


def answered(table, chat, answer):
    """Compute a turn as a scheduler does; return the tokens that were found again."""
    hit = table.match(chat)
    held = table.begin(hit, chat, step=128)
    last = (len(chat) - 1) // PAGE * PAGE
    stops = sorted({s for s in (hit.num_matched, last) if s > hit.num_tokens})
    done = hit.num_tokens
    while done < len(chat):
        done = min([done + 128, len(chat), *(s for s in stops if s > done)])
        assert table.extend(held, done)
        if done in stops:
            table.snapshot(chat[:done], held)
    for word in answer:
        chat.append(word)
        assert table.extend(held, len(chat))
        if len(chat) % PAGE == 0:
            table.snapshot(list(chat), held, moves=True)
    table.publish(list(chat), held)
    table.give_back(held)
    return hit.num_tokens


def found(seed, shares, turns=100):
    """Return what part of all prompts was found in the cache."""
    sizes = (PAGES, PAGES // EXTENTS), (1, EXTENTS)
    manager = manage.as_built("grouped", "ab", PoolPages(1, PAGES, (0, 1), *sizes))
    manager = manager.with_shares(shares)
    ledger = pools.Ledger(PAGES, *sizes)
    table = PageTable(ledger, PrefixCache(PAGE), (FULL, STATE), manager)
    chats, again, asked = Chats(seed), 0, 0
    for _ in range(turns):
        chat = chats.turn()
        asked += len(chat)
        again += answered(table, chat, chats.words(chats.rng.randrange(20, 100)))
    assert table.objections([]) == () and table.num_evicted > 0
    return again / asked


@pytest.mark.parametrize("seed", [1, 2])
def test_states_kept_to_their_share_leave_room_for_texts(seed):
    by_age = found(seed, (1.0, 1.0))  # nobody is ever beyond a share
    kept = found(seed, (1 - TYPICAL, TYPICAL))
    assert kept > 1.15 * by_age > 0.4, (kept, by_age)
