"""Items: kept once, found by words, gone from the disk when they are deleted."""

import multiprocessing
import statistics
import threading
import time

import pytest

from kvmem import errors
from kvmem.session import SessionStore, book, item_rows, search


@pytest.fixture
def items(me):
    return me.items


def test_a_text_that_is_known_is_not_kept_again(items):
    first = items.remember("Ann takes her tea green.")
    assert items.remember("  Ann takes her tea green.\n") == first
    assert items.remember("Ann takes her tea green.", peer="wang").uri != first.uri
    assert items.remember("Ann takes her tea green.", "memories/tea") != first
    assert len(items.list()) == 3


def test_a_key_keeps_one_item_and_one_content(items):
    first = items.remember("green", key="k1")
    assert items.remember("green", key="k1") == first
    with pytest.raises(errors.Conflict, match="'k1'"):
        items.remember("black", key="k1")
    with pytest.raises(errors.Conflict, match="'k1'"):
        items.remember("green", peer="wang", key="k1")
    assert items.list() == (first,)


@pytest.mark.parametrize("key", ["", "x" * 257, "\ud800"])
def test_a_key_that_cannot_be_kept_is_refused(items, key):
    with pytest.raises(errors.InvalidId):
        items.remember("green", key=key)


def test_a_late_retry_does_not_bring_back_what_was_deleted(items):
    uri = items.remember("green", key="k1").uri
    items.delete(uri)
    with pytest.raises(errors.Deleted):
        items.remember("green", key="k1")
    assert items.list() == ()


def test_a_key_follows_its_item_to_another_uri(items):
    uri = items.remember("green", key="k1").uri
    items.move(uri, "memories/tea")
    assert items.remember("green", key="k1").uri == "memories/tea"


def test_a_key_shows_no_item_that_was_moved_out_of_an_actors_sight(items):
    items.remember("green", "memories/x", key="k", actor="bob")
    items.move("memories/x", "peers/alice/x", actor="alice")
    items.put("peers/alice/x", "a secret of alice", actor="alice")
    with pytest.raises(errors.Denied, match="'bob'") as raised:
        items.remember("green", "memories/x", key="k", actor="bob")
    assert "alice" not in str(raised.value), "nor where it is"
    found = items.remember("green", "memories/x", key="k")  # the owner has no view
    assert found.text == "a secret of alice"


@pytest.mark.parametrize("peer", [None, "wang"])
def test_an_empty_uri_is_no_place_of_an_item(items, peer):
    with pytest.raises(errors.InvalidId):
        items.remember("a private note", uri="", peer=peer)
    assert items.list() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda items: items.remember(5),
        lambda items: items.remember("x", uri=5),
        lambda items: items.remember("x", uri=5, peer="wang"),
        lambda items: items.search(5),
        lambda items: items.get(None),
        lambda items: items.names(None),
    ],
)
def test_what_is_no_string_is_refused_in_words(items, wrong):
    with pytest.raises((TypeError, errors.ConfigError), match=" is a string. "):
        wrong(items)


def test_another_text_at_a_uri_is_a_conflict_and_put_replaces_it(items):
    items.remember("green", "memories/tea")
    with pytest.raises(errors.Conflict, match="items.put"):
        items.remember("black", "memories/tea")
    assert items.put("memories/tea", "black").text == "black"
    assert items.put("memories/tea", "black") == items.get("memories/tea")
    assert [hit.text for hit in items.search("green black")] == ["black"]


def test_a_move_onto_another_item_is_a_conflict(items):
    items.put("memories/a", "a")
    items.put("memories/b", "b")
    with pytest.raises(errors.Conflict):
        items.move("memories/a", "memories/b")
    with pytest.raises(errors.NotFound):
        items.move("memories/c", "memories/d")
    assert items.move("memories/a", "memories/a").text == "a"


def test_a_folder_is_what_lies_below_it_and_no_other_name_that_begins_so(items):
    for uri in ("memories/tea", "memories/tea/green", "memories/tea2", "memories.x"):
        items.put(uri, uri)
    assert [i.uri for i in items.list("memories/tea")] == [
        "memories/tea",
        "memories/tea/green",
    ]
    assert items.names("memories") == ("tea", "tea2")
    assert items.stat("memories").num_items == 3
    assert items.stat("memories/tea").kind == "item"
    assert items.delete("memories") == (
        "memories/tea",
        "memories/tea/green",
        "memories/tea2",
    )
    assert [i.uri for i in items.list()] == ["memories.x"]
    with pytest.raises(errors.NotFound):
        items.stat("memories")


def test_roots_under_a_view_have_no_count(items):
    items.put("peers/zhang/memories/x", "x")
    for root in ("", "peers"):
        assert items.stat(root, "wang").num_items is None
        assert items.stat(root).num_items == 1


def test_a_search_in_a_folder_or_a_peers_part_finds_what_lies_there(items):
    items.put("memories/a", "green tea")
    items.put("peers/wang/memories/b", "green tea too")
    items.put("peers/zhang/memories/c", "green tea as well")
    assert [h.uri for h in items.search("tea")] == ["memories/a"]
    assert {h.peer for h in items.search("tea", actor="wang")} == {None, "wang"}
    assert {h.peer for h in items.search("tea", peer_scope="all")} == {
        None,
        "wang",
        "zhang",
    }
    assert [h.peer for h in items.search("tea", under="peers/zhang")] == ["zhang"]
    assert len(items.search("tea", limit=1, peer_scope="all")) == 1
    assert items.search("tea", limit=0) == items.search("...") == ()


@pytest.mark.parametrize("bad", ["", " \n", "\ud800"])
def test_a_text_that_cannot_be_kept_is_refused(items, bad):
    with pytest.raises(errors.ConfigError):
        items.remember(bad)
    with pytest.raises(errors.ConfigError):
        items.put("memories/x", bad)


@pytest.mark.case("SES-29")
def test_separators_of_lines_stay_in_a_text_and_are_refused_in_a_uri(items):
    separators = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    text = separators.join("ab")
    assert items.remember(text, "memories/a").text == text
    assert items.get("memories/a").text == text
    for separator in separators:
        with pytest.raises(errors.InvalidId):
            items.put(f"memories/a{separator}b", "x")


def test_reading_makes_no_file(me, items):
    assert items.list() == items.search("tea") == items.delete("memories") == ()
    with pytest.raises(errors.NotFound):
        items.get("memories/tea")
    assert not me.folder.exists()


@pytest.mark.case("SES-13", "SES-27")
def test_one_text_from_eight_threads_is_one_item(store, me):
    barrier, uris = threading.Barrier(8), []

    def keep(i: int):
        barrier.wait()
        uris.append(me.remember("Ann takes her tea green.").uri)
        uris.append(me.remember(f"fact {i}").uri)

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(set(uris)) == len(me.items.list()) == 9


def _keep_many(root, number: int) -> None:
    me = SessionStore.open(root).principal("lab", "ann")
    for i in range(10):
        me.remember(f"fact {i}")
        me.remember(f"fact {i} of {number}", key=f"k{number}-{i}")


@pytest.mark.case("SES-13")
def test_processes_that_keep_at_once_lose_and_double_nothing(store, me):
    me.remember("fact 0")  # the parent's connection is not the children's
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_keep_many, args=(store.root, i)) for i in range(2)
    ]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(me.items.list()) == 30


def test_deleted_words_are_in_no_file(store, me):
    me.remember("the zebrafinch sings", "memories/a")
    me.remember("the zebrafinch sings, and the xylophone", "memories/b")
    me.items.put("memories/b", "the oboe")
    me.items.delete("memories/a")
    whole = b"".join(p.read_bytes() for p in store.root.rglob("*") if p.is_file())
    assert b"zebrafinch" not in whole and b"oboe" in whole
    assert [hit.text for hit in me.items.search("the")] == ["the oboe"]


def test_a_book_of_another_version_or_owner_or_no_book_is_refused(store, me, tmp_path):
    me.remember("green")
    path = me.folder / "items.sqlite3"
    store.close()
    with pytest.raises(errors.FormatMismatch, match="another user"):
        book.Book(path, ("lab", "bob")).read().__enter__()
    mine = book.Book(path, ("lab", "ann"))
    with mine.change() as cursor:
        cursor.execute("PRAGMA user_version=7")
    mine.close()
    with pytest.raises(errors.FormatMismatch, match="version 7"):
        me.items.list()
    noise = tmp_path / "noise.sqlite3"
    noise.write_bytes(b"\xa5" * 4096)
    with pytest.raises(errors.CorruptPage):
        book.Book(noise, ("lab", "ann")).read().__enter__()


def test_a_transaction_that_fails_leaves_nothing(store, me):
    items = store.book("lab", "ann")
    with pytest.raises(ZeroDivisionError), items.change() as cursor:
        item_rows.write(cursor, "memories/x", "green", None)
        raise ZeroDivisionError
    assert me.items.list() == me.items.search("green") == ()


def test_a_search_of_10_000_items_costs_less_than_20_bare_queries(store, me):
    words = [f"w{i}" for i in range(2000)]
    with store.book("lab", "ann").change() as cursor:
        for i in range(10_000):
            text = " ".join(
                words[(i * j * j + 7 * j) % (50 + 195 * j)] for j in range(10)
            )
            item_rows.write(cursor, f"memories/{i}", f"{text} n{i}", None)

    def median_s(job) -> float:
        times = []
        for _ in range(15):
            start = time.perf_counter()
            job()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    sql = "SELECT rowid, rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT 8"
    session = me.session("s")
    for query in ("n4321", "w17 w55", "w3 w1200 w900 w77"):
        match = search.match_of(query)
        with store.book("lab", "ann").read() as cursor:
            bare = median_s(lambda c=cursor, m=match: c.execute(sql, (m,)).fetchall())
        assert median_s(lambda q=query: me.items.search(q)) < 20 * bare
        assert len(me.recall(query, session=session).entries) > 0
