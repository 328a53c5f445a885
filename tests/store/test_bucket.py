"""A bucket: conditional puts are the server's; what it lacks is refused in words."""

import http.server
import threading
import time

import pytest

from kvmem import errors
from kvmem.store import bucket


def test_what_was_put_is_read_and_listed(s3):
    objects = s3.objects()
    assert objects.read("a/x") is None
    objects.put("a/x", b"one")
    objects.put("a/x", b"two")
    objects.put("a/y", b"")
    objects.put("ab", b"3")
    assert objects.read("a/x") == b"two" and objects.read("a/y") == b""
    assert objects.names() == ["a/x", "a/y", "ab"]
    assert objects.names("a/") == ["a/x", "a/y"]
    assert objects.read_all(["ab", "no", "a/x"]) == [b"3", None, b"two"]
    objects.delete(["a/x", "never"])
    assert objects.names() == ["a/y", "ab"]


def test_a_put_of_something_new_is_refused_where_something_is(s3):
    objects = s3.objects()
    assert objects.put_new("x", b"mine")
    assert objects.put_new("x", b"yours") is None
    assert objects.read("x") == b"mine"


def test_a_put_that_meets_itself_stood(s3):
    objects = s3.objects()
    first = objects.put_new("x", b"mine")
    assert objects.put_new("x", b"mine") == first


def test_a_replacement_needs_the_generation_that_stands(s3):
    objects = s3.objects()
    first = objects.put_new("x", b"1")
    second = objects.replace("x", b"2", first)
    assert second and objects.replace("x", b"3", first) is None
    assert objects.read_versioned("x") == (b"2", second)


def test_the_probe_of_a_real_server_passes_and_leaves_nothing(s3):
    s3.objects().require_conditional_put()
    assert s3.objects().names() == []


def test_of_many_writers_at_once_one_is_first(s3):
    barrier, won = threading.Barrier(8), []

    def race(number: int) -> None:
        objects = s3.objects()
        barrier.wait()
        if objects.put_new("x", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and s3.objects().read("x") == b"%d" % won[0]


class Careless(http.server.BaseHTTPRequestHandler):
    """A server that keeps objects and heeds no condition, or refuses them with 501."""

    objects: dict[str, bytes] = {}
    refuses = False

    def answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("ETag", f'"{hash(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        conditions = {"If-None-Match", "If-Match"} & set(self.headers)
        if self.refuses and conditions:
            return self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        self.objects[self.path] = body
        return self.answer(200)

    def do_GET(self) -> None:
        found = self.objects.get(self.path)
        self.answer(404 if found is None else 200, found or b"")

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self.answer(204)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["ignores", "refuses"])
def careless(request, monkeypatch):
    """Return the address of a server without conditional put."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    handler = type("Handler", (Careless,), {"objects": {}, "refuses": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_server_without_conditional_put_is_refused_for_writing(careless):
    objects = bucket.open_bucket("s3://bucket/p", endpoint=careless, region="us-east-1")
    objects.put("x", b"it works otherwise")
    assert objects.read("x") == b"it works otherwise"
    with pytest.raises(errors.ConfigError, match="no conditional put.*read_only=True"):
        objects.require_conditional_put()


def test_a_server_that_is_not_there_is_an_error_that_names_the_object(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    objects = bucket.open_bucket("s3://bucket/p", "http://127.0.0.1:9", "us-east-1")
    started = time.monotonic()
    with pytest.raises(OSError, match="read: ") as gone:
        objects.read("x")
    assert gone.value.filename == "s3://bucket/p/x"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "url", ["gs://b/p", "memory://b", "file:///tmp/x", "http://h/x", "s3://", "/tmp/x"]
)
def test_a_scheme_that_no_test_covers_is_refused(url):
    with pytest.raises(errors.ConfigError, match="the one scheme that is tested"):
        bucket.open_bucket(url)


@pytest.mark.parametrize(
    ("url", "endpoint"), [("s3://b/p", None), ("s3://bucket/p", "127.0.0.1:9")]
)
def test_what_tensorstore_does_not_take_is_bad_input(url, endpoint):
    with pytest.raises(errors.ConfigError, match="TensorStore does not take it"):
        bucket.open_bucket(url, endpoint, "us-east-1")


@pytest.mark.parametrize(
    ("root", "scheme"),
    [
        ("s3://b/p", "s3"),
        ("S3://b", "s3"),
        ("gs:/b", "gs"),
        ("/a/b", None),
        ("a/b", None),
        ("./s3:x", None),
        ("~/x", None),
    ],
)
def test_a_url_is_told_from_a_path(root, scheme):
    assert bucket.scheme_of(root) == scheme
