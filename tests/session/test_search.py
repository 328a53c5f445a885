"""Queries: words and never syntax, in any script."""

import sqlite3

import hypothesis
import pytest
from hypothesis import strategies as st

from kvmem.session import search

_TABLE = "CREATE VIRTUAL TABLE w USING fts5(body, tokenize='porter unicode61')"
_SYNTAX = st.sampled_from(
    ['"', "'", "*", "(", ")", "^", ":", "-", "+", "NEAR(", " AND ", " OR ", " NOT "]
    + ["body:", "{", "}", ",", ";", "--", "\0", "\u2028", "\ud800", "\u0301", "🙂"]
)


@pytest.fixture(scope="module")
def index():
    connection = sqlite3.connect(":memory:")
    connection.execute(_TABLE)
    texts = ["green tea", "我喜欢喝绿茶", "お茶を飲みます", "ชอบดื่มชา", "녹차를 마신다"]
    for text in texts:
        connection.execute("INSERT INTO w VALUES(?)", (search.indexed(text),))
    yield connection
    connection.close()


def found(index: sqlite3.Connection, query: str) -> int:
    match = search.match_of(query)
    sql = "SELECT count(*) FROM w WHERE w MATCH ?"
    return index.execute(sql, (match,)).fetchone()[0] if match else 0


@hypothesis.given(st.lists(st.one_of(st.text(max_size=8), _SYNTAX), max_size=8))
def test_no_query_is_a_syntax_error(index, parts):
    found(index, "".join(parts))


@pytest.mark.parametrize(
    ("query", "is_found"),
    [
        ("tea", True),
        ("TEAS", True),
        ("coffee", False),
        ("tea NOT green", True),  # words: NOT excludes nothing
        ("gre*", False),  # a star is no wildcard
        ("body:coffee", False),  # a colon names no column
        ("绿茶", True),
        ("茶", True),
        ("茶绿", False),  # neighbours in this order
        ("飲みます", True),
        ("ดื่ม", True),
        ("녹차", True),
        ("ｔｅａ", True),  # full width
    ],
)
def test_words_of_any_script_are_found(index, query, is_found):
    assert (found(index, query) > 0) == is_found


def test_a_query_has_an_end():
    query = " ".join(f"w{i}" for i in range(10_000))
    assert search.match_of(query).count(" OR ") == search.MAX_TERMS - 1


def test_scores_lie_in_0_to_1_and_keep_the_order_of_ranks():
    scores = [search.score_of(rank) for rank in (0.5, 0.0, -1e-6, -1.0, -30.0)]
    assert scores == sorted(scores) and 0.0 <= scores[0] and scores[-1] < 1.0
