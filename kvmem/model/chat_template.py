"""Chat templates: the Jinja program a checkpoint ships to turn messages into text.

Law: the template is the file's own and runs in a sandbox that can neither write nor
reach Python's internals; messages enter as plain JSON data. The environment (trimmed
blocks, `raise_exception`, `strftime_now`, unescaped `tojson`, loop controls) is the one
templates are written for, so the text equals Hugging Face transformers'.

    render(template, [{"role": "user", "content": "Hi"}], True, {"bos_token": "<s>"})
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvmem.errors import ConfigError, say

__all__ = ["render"]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, str],
) -> str:
    """Render messages to text.

    Args:
        template: the Jinja source.
        messages: dicts of JSON data, usually `role` and `content`.
        add_generation_prompt: whether the text ends where the assistant begins.
        variables: names of special tokens and their texts (`bos_token`, …).

    Raises:
        ConfigError: the messages are no JSON data, or the template refuses them.
    """
    try:
        plain = json.loads(json.dumps(list(messages)))
        return _compile(template).render(
            messages=plain, add_generation_prompt=add_generation_prompt, **variables
        )
    except (TypeError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(
            say(
                f"a chat of {len(messages)} messages",
                f"the model's chat template refuses it ({error})",
                "Give dicts with `role` and `content` in the order the template wants",
            )
        ) from error


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Compile a template once in a sandboxed environment."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(template)


def _raise(message: str) -> None:
    """Let a template refuse a conversation."""
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON as templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
