"""Chat templates: sandboxed, plain data in, the words of a refusal out."""

import pytest

from kvmem.errors import ConfigError
from kvmem.model import chat_template

HI = [{"role": "user", "content": "Hi <b> é"}]


def test_blocks_are_trimmed_and_json_is_not_escaped():
    template = (
        "{% for m in messages %}\n"
        "    {% if m['role'] == 'user' %}\n"
        "U: {{ m | tojson }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{{ mark }}{% if add_generation_prompt %}A:{% endif %}"
    )
    text = chat_template.render(template, HI, True, {"mark": "<s>"})
    assert text == 'U: {"role": "user", "content": "Hi <b> é"}\n<s>A:'
    assert not chat_template.render(template, HI, False, {}).endswith("A:")


def test_loop_controls_and_dates_are_there():
    template = "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}"
    assert int(chat_template.render(template, HI, False, {})) >= 2024


def test_a_template_refuses_in_its_own_words():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        chat_template.render(template, HI, False, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].clear() }}",
        "{% for m in messages %}",
    ],
)
def test_a_template_can_neither_write_nor_reach_python(template):
    with pytest.raises(ConfigError, match="refuses it"):
        chat_template.render(template, HI, False, {})


def test_messages_are_plain_data():
    with pytest.raises(ConfigError, match="JSON"):
        chat_template.render("x", [{"role": "user", "content": object()}], False, {})
