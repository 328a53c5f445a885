"""Builders of this room's tests: host books, sequences, a decoder of a few thousand
parameters."""

import itertools

import pytest

from kvmem import pool as pools
from kvmem.prefix import PrefixCache
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import SamplingParams, Sequence
from kvmem.serve.scheduler import Scheduler


class Letters:
    """A text stream whose token t is the letter t: enough for the host's half."""

    def push(self, token):
        return chr(97 + token % 26)

    def finish(self):
        return ""


@pytest.fixture
def page_table():
    def make(num_pages=8, page_size=4):
        return PageTable(pools.Ledger(num_pages), PrefixCache(page_size))

    return make


@pytest.fixture
def new_sequence():
    ids = itertools.count()

    def make(prompt, sample=0, **sampling):
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        return Sequence(next(ids), sample, tuple(prompt), params, Letters())

    return make


@pytest.fixture
def scheduler(page_table):
    def make(num_pages=8, page_size=4, max_batch=4, chunk=8, max_length=256):
        return Scheduler(
            page_table(num_pages, page_size),
            max_batch=max_batch,
            prefill_chunk=chunk,
            max_length=max_length,
        )

    return make
