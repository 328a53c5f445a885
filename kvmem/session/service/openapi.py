"""The service described for others, made from what it runs: OpenAPI 3.1.

The law: paths, bodies and limits come out of the verbs' own table, so the document
cannot promise another service than this one.
"""

import re
from collections.abc import Sequence

import kvmem
from kvmem.session import bodies, problems
from kvmem.session.service.limits import Limits
from kvmem.session.service.requests import ACTOR
from kvmem.session.service.verbs import Verb

__all__ = ["document"]

_PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def document(verbs: Sequence[Verb], limits: Limits) -> dict[str, object]:
    """Return the OpenAPI document of these verbs."""
    paths: dict[str, dict] = {}
    for verb in verbs:
        paths.setdefault(verb.path, {})[verb.method.lower()] = _operation(verb)
    for path, words in (
        ("/health", "Say that the service runs."),
        ("/openapi.json", "Return this document."),
    ):
        paths[path] = {"get": _open(path, words)}
    paths["/metrics"] = {"get": _operation_head("metrics", "Return counters.")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvmem sessions",
            "version": kvmem.__version__,
            "description": _words(limits),
        },
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Problem": _PROBLEM}
            | {v.body.__name__: bodies.schema(v.body) for v in verbs if v.body},
        },
        "security": [{"key": []}],
    }


def _operation(verb: Verb) -> dict[str, object]:
    operation = _operation_head(verb.name, verb.summary, str(verb.status))
    operation["parameters"] = [*_parameters(verb)]
    if verb.body is not None:
        ref = {"$ref": f"#/components/schemas/{verb.body.__name__}"}
        content = {"application/json": {"schema": ref}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _operation_head(name: str, words: str, status: str = "200") -> dict[str, object]:
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        "operationId": name,
        "summary": words,
        "responses": {
            status: {"description": "Done."},
            "default": {
                "description": "Refused, and why.",
                "content": {problems.MEDIA_TYPE: problem},
            },
        },
    }


def _open(path: str, words: str) -> dict[str, object]:
    name = path.strip("/").partition(".")[0]
    return _operation_head(name, words) | {"security": []}


def _parameters(verb: Verb):
    for name in re.findall(r"{(\w+)}", verb.path):
        yield _parameter(name, "path", True)
    for name in verb.query:
        yield _parameter(name, "query", False)
    if verb.for_actor:
        yield _parameter(ACTOR, "header", False)


def _parameter(name: str, place: str, required: bool) -> dict[str, object]:
    kind = "integer" if name in ("since", "limit") else "string"
    return {"name": name, "in": place, "required": required, "schema": {"type": kind}}


def _words(limits: Limits) -> str:
    return (
        f"A body has at most {limits.max_body_nbytes:,} bytes, a batch "
        f"{limits.max_messages} messages, and a key {limits.requests_per_s:g} requests "
        "a second. A key is one user of one account; no header changes them."
    )
