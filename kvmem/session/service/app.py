"""The service as an ASGI app: one table of verbs, each run on its user's principal.

The law: every request passes the same doors in the same order (identity headers, key,
rate, body, verb), and what a verb raises is told as problem+json. A verb runs in a
thread and to its end, whether or not anybody waits for the answer: an append is whole
or was never begun.

    app = create_app(SessionStore.open(root), KeyRing(root))
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route

from kvmem import errors
from kvmem.session import bodies, problems
from kvmem.session.keys import KeyRing
from kvmem.session.problems import Problem, Refused
from kvmem.session.service import metrics as counting
from kvmem.session.service import openapi, requests, verbs
from kvmem.session.service.limits import Lanes, Limiter, Limits

__all__ = ["create_app"]

_logger = logging.getLogger("kvmem.session.service")


def create_app(store, keys: KeyRing, limits: Limits | None = None) -> Starlette:
    """Return the app of a session store.

    Args:
        store: a `SessionStore`; the app closes it when it ends.
        keys: who may ask, and as whom.
        limits: what is taken; None for the defaults.
    """
    limits = limits or Limits()
    service = _Service(store, keys, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await run_in_threadpool(store.close)

    routes = [Route(v.path, service.endpoint(v), methods=[v.method]) for v in verbs.ALL]
    return Starlette(
        routes=[*routes, *_open_routes(service)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route, Exception: _fault},
    )


class _Service:
    """What the endpoints share."""

    def __init__(self, store, keys: KeyRing, limits: Limits):
        self.store, self.keys, self.limits = store, keys, limits
        self.metrics = counting.Metrics()
        self._limiter = Limiter(limits.requests_per_s)
        self._lanes = Lanes(limits)

    def endpoint(self, verb: verbs.Verb) -> Callable:
        """Return the endpoint of one verb."""

        async def answer(request: Request) -> Response:
            return await self.timed(verb.name, lambda: self._run(verb, request))

        return answer

    async def timed(self, name: str, job: Callable) -> Response:
        """Return a job's response, or that of its error, and count it."""
        start = time.perf_counter()
        try:
            response = await job()
        except ClientDisconnect:  # nobody is there to be answered
            response = Response(status_code=499)
        except Exception as error:
            problem = problems.of(error)
            if problem.status >= 500 and problem.name != "busy":
                _logger.exception("%s failed", name)
            response = _told(problem)
        self.metrics.answered(name, response.status_code, time.perf_counter() - start)
        return response

    def admitted(self, request: Request):
        """Return the key of a request that may go on, else raise."""
        requests.refuse_identity(request)
        key = requests.key_of(request, self.keys)
        if wait_s := self._limiter.wait_s(key.id):
            rate = self.limits.requests_per_s
            detail = (
                f"this key: it may send {rate:g} requests a second. Wait and retry."
            )
            raise Refused(Problem(429, "too-many", "Too many requests", detail, wait_s))
        return key

    async def _run(self, verb: verbs.Verb, request: Request) -> Response:
        key = self.admitted(request)
        query = requests.query_of(request, verb.query)
        actor = requests.actor_of(request) if verb.for_actor else None
        body = None
        if verb.body is not None:
            body = bodies.read(verb.body, await requests.body_of(request, self.limits))
            _refuse_long(body, self.limits)
        principal = self.store.principal(key.account, key.user)
        call = verbs.Call(principal, request.path_params, query, body, actor)
        answer = await self._lanes.run(key.id, verb.run, call)
        self._count(verb.name, body, answer)
        return _said(answer, verb.status)

    def _count(self, name: str, body: object, answer: dict) -> None:
        if name == "recall":
            self.metrics.recalled(answer["stats"]["status"])
        elif name in ("append", "capture") and not answer.get("is_repeat"):
            self.metrics.appended(len(body.messages))


def _open_routes(service: _Service) -> Sequence[Route]:
    """Return the routes that are no verbs; only metrics asks for a key."""
    document = openapi.document(verbs.ALL, service.limits)

    async def health(_):
        return JSONResponse({"status": "ok"})

    async def described(_):
        return JSONResponse(document)

    async def metrics(request: Request):
        async def job():
            service.admitted(request)
            return PlainTextResponse(
                service.metrics.text(), media_type=counting.MEDIA_TYPE
            )

        return await service.timed("metrics", job)

    return (
        Route("/health", health),
        Route("/openapi.json", described),
        Route("/metrics", metrics),
    )


def _refuse_long(body: object, limits: Limits) -> None:
    """Raise for a batch of more messages than the service takes."""
    messages = getattr(body, "messages", ())
    if len(messages) > limits.max_messages:
        raise requests.bad(
            f"{len(messages)} messages",
            f"a batch has at most {limits.max_messages}",
            "Send several batches",
        )


def _said(answer: object, status: int) -> Response:
    """Return an answer in ASCII: half a character that a log holds is told as it is."""
    raw = json.dumps(answer, separators=(",", ":")).encode()
    return Response(raw, status, media_type="application/json")


def _told(problem: Problem) -> Response:
    headers = {}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status == 413:  # the rest of the body is not read
        headers["Connection"] = "close"
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    return JSONResponse(
        problem.body, problem.status, headers, media_type=problems.MEDIA_TYPE
    )


def _no_route(request: Request, error: HTTPException) -> Response:
    """Tell of a path or method that is none of the service's."""
    name = "not-found" if error.status_code == 404 else "bad-request"
    law = "the service has no such verb"
    detail = errors.say(f"{request.method} on this path", law, "See /openapi.json")
    told = _told(Problem(error.status_code, name, str(error.detail), detail))
    if error.status_code == 405:
        told.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return told


def _methods(request: Request) -> set[str]:
    """Return the methods that a request's path has."""
    return {
        method
        for route in request.app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods
    }


def _fault(request: Request, error: Exception) -> Response:
    return _told(problems.of(error))
