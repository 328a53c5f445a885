"""The service: whose key it is says whose memory it is, and nothing else does."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.parse

import httpx
import pytest

from kvmem.session import Hit, SessionStore, lines
from kvmem.session.keys import KeyRing
from kvmem.session.service import Limits, create_app, verbs

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def ask(served):
    """Send one request as a user; return the response."""
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=served.url, timeout=30))
        keys = {}

        def ask(method, path, body=None, user="ann", headers=(), **more):
            if user not in keys:
                keys[user] = served.key("lab", user)
            headers = {"Authorization": f"Bearer {keys[user]}"} | dict(headers)
            return http.request(method, path, json=body, headers=headers, **more)

        yield ask


def problem(response, status: int, name: str) -> str:
    """Return the detail of a refusal of this kind."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert set(body) == {"type", "title", "status", "detail"}
    assert (body["type"], body["status"]) == (f"urn:kvmem:{name}", status)
    return body["detail"]


def test_what_is_appended_is_there_once_a_key(ask):
    first = ask("POST", "/v1/sessions/s/messages", HELLO | {"key": "k1"})
    again = ask("POST", "/v1/sessions/s/messages", HELLO | {"key": "k1"})
    assert (first.status_code, first.json()) == (
        201,
        {"first": 0, "stop": 1, "is_repeat": False},
    )
    assert again.json()["is_repeat"]
    found = ask("GET", "/v1/sessions/s/messages").json()
    assert (found["clock"], len(found["messages"]), found["next"]) == (1, 1, None)
    other = {"messages": [{"role": "user", "content": "other"}], "key": "k1"}
    problem(ask("POST", "/v1/sessions/s/messages", other), 409, "conflict")


@pytest.mark.parametrize(
    "header",
    ["X-Kvmem-Account", "X-Kvmem-User", "X-Kvmem-Role", "X-OpenViking-Account"]
    + ["X-OpenViking-User", "X-OpenViking-Actor-Peer", "X-User-Id", "X-Account"]
    + ["X-Tenant", "Remote-User", "X-Forwarded-User", "x-kvmem-anything"],
)
def test_a_header_that_says_who_asks_is_refused_and_not_ignored(ask, header):
    for path in ("/v1/sessions/s/messages", "/metrics"):
        response = ask("GET", path, headers={header: "ann"})
        assert header.lower() in problem(response, 400, "identity-header")


@pytest.mark.parametrize("member", ["account", "user", "actor", "tenant"])
def test_a_member_that_says_who_asks_is_refused(ask, member):
    said = problem(
        ask("POST", "/v1/recall", {"query": "x", member: "bob"}), 400, "bad-request"
    )
    assert f"no member '{member}'" in said
    query = {"params": {member: "bob"}}
    problem(ask("GET", "/v1/sessions/s/messages", **query), 400, "bad-request")


@pytest.mark.parametrize(
    "said", ["", "Bearer", "Bearer x", "Basic eDp5", "Bearer kvmem_00000000_x", "é"]
)
def test_without_a_key_nothing_is_told(served, said):
    for path in ("/v1/sessions/s/messages", "/metrics"):
        headers = {"Authorization": said.encode()} if said else {}
        response = httpx.get(served.url + path, headers=headers)
        problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def test_two_keys_in_one_request_are_no_key(served):
    key = served.key("lab", "ann")
    headers = [("Authorization", f"Bearer {key}")] * 2
    response = httpx.get(f"{served.url}/v1/sessions/s/messages", headers=headers)
    problem(response, 401, "unauthorized")


@pytest.mark.case("SES-01")
def test_sessions_of_one_name_are_each_users_own_and_no_error_names_another(ask):
    secret = {"messages": [{"role": "user", "content": "anns secret"}], "key": "k"}
    ask("POST", "/v1/sessions/s/messages", secret)
    ask("POST", "/v1/items", {"text": "anns secret tea", "uri": "memories/tea"})
    said = problem(ask("GET", "/v1/sessions/s/messages", user="bob"), 404, "not-found")
    assert "ann" not in said
    for method, path, body in (
        ("POST", "/v1/sessions/s/messages", HELLO | {"key": "k"}),
        ("POST", "/v1/items", {"text": "green", "uri": "memories/tea"}),
        ("POST", "/v1/recall", {"query": "secret tea", "session": "s"}),
        ("POST", "/v1/forget", {"uri": "memories/tea"}),
        ("POST", "/v1/sessions/s/commit", {}),
        ("GET", "/v1/sessions/s/capture", None),
        ("GET", "/v1/sessions/s/messages", None),
        ("DELETE", "/v1/sessions/s", None),
        ("GET", "/metrics", None),
    ):
        response = ask(method, path, body, user="bob")
        assert response.is_success, response.text
        assert "ann" not in response.text, path
    assert len(ask("GET", "/v1/sessions/s/messages").json()["messages"]) == 1
    assert ask("POST", "/v1/recall", {"query": "tea"}).json()["entries"]


def test_a_deleted_session_is_gone_and_says_so(ask):
    ask("POST", "/v1/sessions/s/messages", HELLO)
    assert ask("DELETE", "/v1/sessions/s").json() == {"deleted": "s"}
    problem(ask("GET", "/v1/sessions/s/messages"), 410, "deleted")
    problem(ask("POST", "/v1/sessions/s/messages", HELLO), 410, "deleted")


def test_the_actor_touches_append_recall_and_capture_and_no_other_verb(ask):
    for actor in ("A", "B"):
        ask("POST", "/v1/items", {"text": f"green tea of {actor}", "peer": actor})
    as_a, as_b = {"X-Kvmem-Actor": "A"}, {"X-Kvmem-Actor": "B"}
    found = ask("POST", "/v1/recall", {"query": "tea"}, headers=as_a).json()
    assert [e["peer"] for e in found["entries"]] == ["A"] and found["actor"] == "A"
    found = ask("POST", "/v1/recall", {"query": "tea"}, headers=as_b).json()
    assert [e["peer"] for e in found["entries"]] == ["B"]
    ask("POST", "/v1/sessions/s/messages", HELLO, headers=as_a)
    captured = HELLO | {"after": 0}
    ask("POST", "/v1/sessions/s/capture", captured, headers=as_b)
    (said, taken) = ask("GET", "/v1/sessions/s/messages", headers=as_b).json()[
        "messages"
    ]
    assert (said["actor"], taken["actor"]) == ("A", "B")
    marks = ask("GET", "/v1/sessions/s/capture", headers=as_a).json()["marks"]
    assert marks == []
    bad = {"X-Kvmem-Actor": "a/b"}
    problem(ask("POST", "/v1/recall", {"query": "x"}, headers=bad), 400, "invalid-id")
    assert ask("GET", "/v1/sessions/s/messages", headers=bad).is_success
    twice = [("X-Kvmem-Actor", "A"), ("X-Kvmem-Actor", "B")]
    key = ask("GET", "/health").request.headers["authorization"]
    response = httpx.post(
        ask("GET", "/health").request.url.join("/v1/recall"),
        json={"query": "x"},
        headers=[*twice, ("Authorization", key)],
    )
    problem(response, 400, "bad-request")


@pytest.mark.case("SES-05")
@pytest.mark.parametrize("id_", ["a\\b", "C:x", "x" * 300, " pad ", "CON", "e\u0301"])
def test_a_session_id_that_cannot_be_is_refused(ask, served, id_):
    path = f"/v1/sessions/{urllib.parse.quote(id_, safe='')}/messages"
    problem(ask("POST", path, HELLO), 400, "invalid-id")
    for climbing in ("..%2f..%2fetc", "%2e%2e", "a%2fb"):
        path = f"/v1/sessions/{climbing}/messages"
        assert ask("POST", path, HELLO).status_code in (400, 404)
    assert {p.name for p in served.root.iterdir()} <= {
        "accounts",
        "keys.json",
        ".keys.json.lock",
        ".lock",
        "store.json",
    }


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b'{"query": NaN}', b'{"query": 1e999}', b"\xff", b"null"]
    + [b'{"query": "\\ud800"}', b'{"query":"a","query":"b"}', b'{"query": 3}']
    + [b"[" * 100_000],
)
def test_what_is_no_json_of_the_verb_is_refused(served, raw):
    headers = {"Authorization": f"Bearer {served.key('lab', 'ann')}"}
    response = httpx.post(f"{served.url}/v1/recall", content=raw, headers=headers)
    problem(response, 400, "bad-request")


def test_paths_and_methods_that_are_none_of_the_services_are_problems(ask):
    problem(ask("GET", "/v1/nothing"), 404, "not-found")
    problem(ask("PUT", "/v1/recall", {}), 405, "bad-request")


def test_a_body_and_a_batch_have_their_limits(ask, served):
    text = "x" * (1 << 20)
    too_large = {"messages": [{"role": "user", "content": text}]}
    problem(ask("POST", "/v1/sessions/s/messages", too_large), 413, "too-large")
    many = {"messages": HELLO["messages"] * 101}
    said = problem(ask("POST", "/v1/sessions/s/messages", many), 400, "bad-request")
    assert "at most 100" in said
    problem(ask("GET", "/v1/sessions/s/messages"), 404, "not-found")
    some = {"messages": HELLO["messages"] * 100}
    assert ask("POST", "/v1/sessions/s/messages", some).json()["stop"] == 100

    def chunks():  # no length is said before
        for _ in range(300):
            yield b" " * 4096

    headers = {"Authorization": f"Bearer {served.key('lab', 'ann')}"}
    url = f"{served.url}/v1/recall"
    problem(httpx.post(url, content=chunks(), headers=headers), 413, "too-large")


def test_a_key_that_asks_too_often_waits_and_others_do_not(tmp_path):
    ring = KeyRing(tmp_path)
    app = create_app(SessionStore.open(tmp_path), ring, Limits(requests_per_s=5.0))
    keys = [{"Authorization": f"Bearer {ring.add('lab', u)}"} for u in ("ann", "bob")]

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://k") as http:
            found = [
                await http.get("/v1/sessions/s/messages", headers=keys[0])
                for _ in range(8)
            ]
            other = await http.get("/v1/sessions/s/messages", headers=keys[1])
        return found, other

    found, other = asyncio.run(run())
    assert [r.status_code for r in found[:5]] == [404] * 5
    problem(found[-1], 429, "too-many")
    assert found[-1].headers["retry-after"] == "1" and other.status_code == 404


def test_a_request_that_is_cut_off_leaves_nothing_or_the_whole_batch(served, ask):
    batch = {"messages": [{"role": "user", "content": f"m{i}"} for i in range(20)]}
    body = json.dumps(batch).encode()
    address = urllib.parse.urlsplit(served.url)
    key = served.key("lab", "ann")
    for cut in (0, 1, len(body) // 2, len(body) - 1, len(body)):
        head = (
            f"POST /v1/sessions/s{cut}/messages HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((address.hostname, address.port)) as wire:
            wire.sendall(head.encode() + body[:cut])
    ask("POST", "/v1/sessions/last/messages", HELLO)  # what came before is done with
    for cut in (0, 1, len(body) // 2, len(body) - 1):
        path = f"/v1/sessions/s{cut}/messages"
        problem(ask("GET", path), 404, "not-found")
    deadline = threading.Event()
    for _ in range(100):
        whole = ask("GET", f"/v1/sessions/s{len(body)}/messages")
        if whole.is_success:
            break
        deadline.wait(0.05)
    assert [m["parts"][0]["text"] for m in whole.json()["messages"]] == [
        f"m{i}" for i in range(20)
    ]


def test_half_a_character_that_a_program_stored_is_told_as_it_is(ask, served):
    ask("POST", "/v1/sessions/s/messages", HELLO)
    (log,) = served.root.rglob("messages.jsonl")  # as a kvmem before this one wrote it
    head, line, _ = log.read_bytes().split(b"\n")
    fields = lines.unseal(line)
    fields["message"]["parts"][0]["text"] = "\ud800"
    log.write_bytes(head + b"\n" + lines.seal(fields))
    found = ask("GET", "/v1/sessions/s/messages").json()["messages"]
    assert found[0]["parts"][0]["text"] == "\ud800"


def test_a_recall_has_an_end(ask):
    for limit in (0, -1, 101):
        body = {"query": "tea", "limit": limit}
        problem(ask("POST", "/v1/recall", body), 400, "bad-request")
    assert ask("POST", "/v1/recall", {"query": "tea", "limit": 100}).is_success


def test_damage_is_told_without_a_path_and_recall_still_answers(ask, served):
    ask("POST", "/v1/sessions/s/messages", {"messages": HELLO["messages"] * 3})
    (log,) = served.root.rglob("messages.jsonl")
    rows = log.read_bytes().split(b"\n")
    rows[2] = rows[2].replace(b"hello", b"hullo")
    log.write_bytes(b"\n".join(rows))
    ask("POST", "/v1/items", {"text": "green tea"})
    said = problem(ask("POST", "/v1/sessions/s/messages", HELLO), 500, "damaged")
    assert str(served.root) not in said and "ann" not in said
    found = ask("POST", "/v1/recall", {"query": "tea", "session": "s"}).json()
    assert found["stats"]["status"] == "unavailable" and len(found["entries"]) == 1


def test_the_document_describes_the_verbs_that_run(ask):
    document = ask("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    said = {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    named = {verb.name: (verb.method, verb.path) for verb in verbs.ALL}
    assert {n: said[n][:2] for n in named} == named
    assert set(said) - set(named) == {"health", "openapi", "metrics"}
    for verb in verbs.ALL:
        operation = said[verb.name][2]
        actor = {"x-kvmem-actor"} & {p["name"] for p in operation["parameters"]}
        takes_one = ("append", "recall", "capture", "captured")
        assert bool(actor) == (verb.name in takes_one)
        if verb.body:
            schema = document["components"]["schemas"][verb.body.__name__]
            assert "account" not in json.dumps(schema)
    assert "1,048,576 bytes" in document["info"]["description"]


def test_metrics_count_verbs_and_name_nobody(ask):
    ask("POST", "/v1/sessions/annssession/messages", HELLO)
    ask("POST", "/v1/recall", {"query": "x", "session": "annssession"})
    ask("POST", "/v1/recall", {"query": 3})
    text = ask("GET", "/metrics").text
    assert 'kvmem_requests_total{verb="append",status="201"} 1' in text
    assert 'kvmem_requests_total{verb="recall",status="400"} 1' in text
    assert 'kvmem_recalls_total{status="new"} 1' in text
    assert "kvmem_messages_appended_total 1" in text
    assert "ann" not in text and "lab" not in text


def test_a_fault_of_a_verb_is_a_problem_and_the_service_goes_on(tmp_path):
    class Broken:
        def search(self, principal, query, limit, actor, peer_scope) -> list[Hit]:
            raise RuntimeError(f"secret of {principal.user}")

    ring = KeyRing(tmp_path)
    app = create_app(SessionStore.open(tmp_path, retriever=Broken()), ring)
    key = {"Authorization": f"Bearer {ring.add('lab', 'ann')}"}

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://k") as http:
            return await http.post("/v1/recall", json={"query": "x"}, headers=key)

    found = asyncio.run(run())
    assert found.json()["stats"]["retrieval_errors"] == 1
    assert "secret" not in found.text


@pytest.mark.parametrize("sources", [5, True, "abc", {"a": 1}, [5]])
@pytest.mark.parametrize("verb", ["messages", "capture"])
def test_sources_that_are_no_list_of_ids_are_refused(ask, sources, verb):
    body = {"messages": [HELLO["messages"][0] | {"sources": sources}]}
    body |= {"after": 0} if verb == "capture" else {}
    problem(ask("POST", f"/v1/sessions/s/{verb}", body), 400, "bad-request")


def test_a_recall_for_a_session_without_a_name_is_refused(ask):
    body = {"query": "tea", "session": ""}
    problem(ask("POST", "/v1/recall", body), 400, "invalid-id")


@pytest.mark.parametrize("depth", [60, 500])
def test_what_was_acknowledged_can_be_read_however_deep_it_is(ask, served, depth):
    value = None
    for _ in range(depth):
        value = {"a": [value]} if depth < 100 else [value]
    batch = [{"role": "user", "content": [{"type": "x", "v": value}]}]
    said = ask("POST", "/v1/sessions/s/messages", {"messages": batch})
    problem(said, 400, "bad-request")
    served.store.principal("lab", "ann").session("s").append(batch)
    found = ask("GET", "/v1/sessions/s/messages").json()["messages"]
    assert found[0]["parts"][0]["v"] == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"half \xed\xa0\x80"}]}',
        json.dumps(HELLO).encode("utf-16"),
        b"\xef\xbb\xbf" + json.dumps(HELLO).encode(),
    ],
)
def test_a_body_that_is_no_utf_8_is_refused(ask, served, raw):
    url = f"{served.url}/v1/sessions/s/messages"
    key = {"Authorization": f"Bearer {served.key('lab', 'bob')}"}
    said = httpx.post(url, content=raw, headers=key)
    assert "UTF-8" in problem(said, 400, "bad-request")
    assert served.store.principal("lab", "bob").sessions() == ()


def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(ask):
    said = ask("PUT", "/v1/sessions/s/messages")
    problem(said, 405, "bad-request")
    assert said.headers["allow"] == "GET, HEAD, POST"
    assert ask("GET", "/v1/sessions/s").headers["allow"] == "DELETE, POST"


def test_a_deleted_session_is_made_anew_by_create(ask):
    ask("POST", "/v1/sessions/s/messages", HELLO)
    ask("DELETE", "/v1/sessions/s")
    said = ask("POST", "/v1/sessions/s")
    assert (said.status_code, said.json()) == (201, {"created": True})
    assert ask("POST", "/v1/sessions/s").json() == {"created": False}
    assert ask("GET", "/v1/sessions/s/messages").json()["clock"] == 0


def test_a_users_stuck_session_keeps_nobody_else_waiting(tmp_path):
    ring, limits = KeyRing(tmp_path), Limits(max_threads=2, max_waiting=3)
    other = SessionStore.open(tmp_path).principal("lab", "ann").session("s")
    app = create_app(SessionStore.open(tmp_path, wait_s=0.3), ring, limits)
    ann, bob = (
        {"Authorization": f"Bearer {ring.add('lab', user)}"} for user in ("ann", "bob")
    )

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://k") as http:

            def post(path, body, key):
                return asyncio.create_task(http.post(path, json=body, headers=key))

            stuck = [post("/v1/sessions/s/messages", HELLO, ann) for _ in range(48)]
            done = [await post("/v1/items", {"text": "x"}, bob)]
            running = sum(not each.done() for each in stuck)
            return done[0].status_code, running, [(await each) for each in stuck]

    with other.place.locked():
        status, running, refused = asyncio.run(run())
    assert (status, running) == (201, 5)  # two have a thread, three wait for one
    assert {each.status_code for each in refused} == {503}
    assert all(each.headers["retry-after"] == "1" for each in refused)
