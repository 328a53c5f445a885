"""Views: what lies in another peer's part is denied by its name."""

import hypothesis
import pytest
from hypothesis import strategies as st

from kvmem import errors
from kvmem.session import views
from kvmem.session.search import Hit

_NAMES = st.sampled_from(["wang", "zhang", "wangx", "Wang", "a@b"])
_PATHS = st.lists(
    st.sampled_from(["memories", "peers", "resources", "x", "zhang", "é", "..x"]),
    min_size=1,
    max_size=3,
).map("/".join)


@hypothesis.given(_NAMES, _NAMES, _PATHS)
def test_an_actor_uses_its_own_part_and_the_self_and_no_other(actor, peer, path):
    uri = f"peers/{peer}/{path}"
    if actor == peer:
        assert views.checked(uri, actor, "get") == uri
    else:
        with pytest.raises(errors.Denied, match="own peer"):
            views.checked(uri, actor, "get")
    assert views.sees(uri, actor) == views.covers(uri, actor, "actor")
    assert views.sees(uri, actor) == (actor == peer)
    assert views.covers(uri, actor, "all") and views.sees(uri, None)


@pytest.mark.parametrize("root", ["", "peers"])
def test_roots_that_may_hide_peers_are_listed_and_never_changed(root):
    for verb in ("list", "search", "stat"):
        assert views.checked(root, "wang", verb, whole=True) == root
    for verb in ("delete", "forget", "move", "put", "remember"):
        with pytest.raises(errors.Denied, match="does not see"):
            views.checked(root, "wang", verb, whole=True)
    assert views.checked(root, None, "delete", whole=True) == root


@pytest.mark.case("SES-05")
@pytest.mark.parametrize(
    "uri",
    ["../x", "/etc/x", "a\\..\\b", "", "a//b", "a/", ".", "a/./b", "x" * 1025]
    + ["a\0b", "a\nb", "a\u2028b", "a\u2029b", "a\x85b", "a\x0bb", "\ud800"]
    + ["e\u0301", "peers", "peers/wang", "peers/../x", "peers/é/x", "peers/ wang/x"],
)
def test_what_is_no_path_of_the_tree_is_refused(uri):
    with pytest.raises(errors.InvalidId):
        views.checked(uri, None, "put")


def test_a_uri_is_put_into_its_peers_part_or_refused():
    assert views.owned_by("memories/tea", "wang") == "peers/wang/memories/tea"
    assert views.owned_by("peers/wang/tea", "wang") == "peers/wang/tea"
    assert views.owned_by("memories/tea", None) == "memories/tea"
    with pytest.raises(errors.InvalidId, match="not a place of peer"):
        views.owned_by("peers/zhang/tea", "wang")


def test_a_peers_preference_is_lowered_less_than_its_events():
    hits = [
        Hit("peers/b/memories/events/x", "", 0.5),
        Hit("peers/b/memories/preferences/x", "", 0.5),
        Hit("memories/x", "", 0.5),
    ]
    ranked = views.ranked(hits, "a", "all")
    assert [round(hit.score, 2) for hit in ranked] == [0.5, 0.48, 0.4]


def test_a_scope_of_another_word_is_refused():
    with pytest.raises(errors.ConfigError, match="no isolation"):
        views.checked_scope("everyone")
