"""A root by name: URLs go to their server or are refused, never to a folder."""

import pytest

from kvmem import errors, geometry, store

SIZES = {"record_nbytes": 96, "chunk_tokens": 4}


def test_a_folder_is_a_page_store(tmp_path):
    with store.open_root(tmp_path / "a", "m", "f", **SIZES, max_nbytes=1 << 20) as kept:
        assert isinstance(kept, store.PageStore)
        assert kept._keeper.max_nbytes == 1 << 20
    assert (tmp_path / "a" / "_store.json").exists()


def test_s3_is_an_object_store(s3):
    place = s3.place | {"max_nbytes": 1 << 20}
    with store.open_root(s3.url, "m", "f", **SIZES, **place) as kept:
        assert isinstance(kept, store.ObjectStore) and kept.writable
        assert kept._keeper.max_nbytes == 1 << 20
    with store.open_root(s3.url, "m", "f", **SIZES, read_only=True, **s3.place) as kept:
        assert not kept.writable


@pytest.mark.parametrize("url", ["gs://bucket/p", "http://h/p", "memory://x", "gs:/b"])
def test_other_schemes_are_refused_and_make_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigError, match="the one scheme that is tested"):
        store.open_root(url, "m", "f", **SIZES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket/p", "gs://bucket/p", "file:///tmp/x"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_url_never_reaches_orbax(url, read_only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigError, match="a URL never reaches Orbax"):
        store.PageStore.open(url, "m", "f", **SIZES, read_only=read_only)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("root", "options", "words"),
    [
        ("/a", {"endpoint": "http://h"}, "only an s3:// root has a server"),
        ("/a", {"region": "r"}, "only an s3:// root has a server"),
        (None, {"max_nbytes": 9}, "without a root nothing is kept"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(root, options, words):
    every = {"max_nbytes": None, "endpoint": None, "region": None} | options
    with pytest.raises(errors.ConfigError, match=words):
        store.check_options(root, **every)


@pytest.mark.parametrize("url", ["s3://bucket/p", "gs:/b"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_of_parts_makes_no_folder_of_a_url(
    url, read_only, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    part = store.Part("base", geometry.Lifecycle("full"), (0,), (96,))
    with pytest.raises(errors.ConfigError, match="a URL never reaches Orbax"):
        store.PartedStore.open(url, "m", "f", [part], read_only=read_only)
    assert list(tmp_path.iterdir()) == []
