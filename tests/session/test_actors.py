"""Actors: scopes nest, end with their block, and are seen by nobody beside them."""

import asyncio
import concurrent.futures
import contextvars
import threading

import pytest

from kvmem import errors
from kvmem.session import actors

ANN, BOB = ("lab", "ann"), ("lab", "bob")


def test_a_name_of_the_call_wins_over_the_scope_and_that_over_the_default():
    with actors.acting_as("scope", ANN):
        assert actors.resolve(ANN, "call", "default") == "call"
        assert actors.resolve(ANN, None, "default") == "scope"
    assert actors.resolve(ANN, None, "default") == "default"
    assert actors.resolve(ANN) is None


def test_a_scope_of_none_takes_only_the_scope_away():
    with actors.acting_as("outer", ANN), actors.acting_as(None, ANN):
        assert actors.resolve(ANN) is None
        assert actors.resolve(ANN, None, "default") == "default"


def test_a_scope_of_one_user_does_not_filter_another():
    with actors.acting_as("planner", ANN):
        assert actors.resolve(BOB) is None
        with actors.acting_as("critic", BOB):
            assert (actors.resolve(ANN), actors.resolve(BOB)) == ("planner", "critic")


def test_an_exception_ends_a_scope():
    with pytest.raises(KeyError), actors.acting_as("planner", ANN):
        raise KeyError
    assert actors.scoped(ANN) is None


def test_a_bad_name_opens_no_scope():
    with pytest.raises(errors.InvalidId), actors.acting_as("a/b", ANN):
        pass
    assert actors.scoped(ANN) is None


def test_tasks_that_run_beside_each_other_keep_their_own():
    async def one(name: str, started: asyncio.Barrier) -> list[str | None]:
        seen = []
        with actors.acting_as(name, ANN):
            for _ in range(20):
                await started.wait()
                seen.append(actors.resolve(ANN))
        return seen

    async def all_of_them():
        started = asyncio.Barrier(8)
        return await asyncio.gather(*(one(f"a{i}", started) for i in range(8)))

    found = asyncio.run(all_of_them())
    assert [set(seen) for seen in found] == [{f"a{i}"} for i in range(8)]


def test_a_bare_thread_starts_without_an_actor_and_a_copied_context_has_it():
    with (
        actors.acting_as("planner", ANN),
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        bare = pool.submit(contextvars.Context().run, actors.resolve, ANN).result()
        copied = pool.submit(
            contextvars.copy_context().run, actors.resolve, ANN
        ).result()
    assert (bare, copied) == (None, "planner")


def test_a_required_actor_that_is_missing_is_loud_in_a_worker_thread():
    caught = []

    def work():
        try:
            actors.resolve(ANN, required=True)
        except errors.ActorRequired as error:
            caught.append(str(error))

    with actors.acting_as("planner", ANN):
        thread = threading.Thread(target=contextvars.Context().run, args=(work,))
        thread.start()
        thread.join()
        assert actors.resolve(ANN, required=True) == "planner"
    assert "copy_context" in caught[0]
