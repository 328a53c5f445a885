"""What somebody spells is hidden from a template, and comes back as it was said."""

from kvmem.model import spelled

SPECIALS = ("<s>", "<s>x", "</s>")


def test_messages_that_spell_none_are_not_touched():
    assert spelled.hide([{"role": "<s>", "content": "s>"}], SPECIALS) is None


def test_all_that_somebody_said_is_hidden_and_what_a_program_names_is_not():
    said = [
        {
            "role": "<s>",
            "content": [{"type": "</s>", "text": "a</s>b"}],
            "tool_calls": [{"name": "f", "arguments": {"q": ("<s>", 3, None)}}],
        }
    ]
    hidden = spelled.hide(said, SPECIALS)
    (message,) = hidden.messages
    assert (message["role"], message["content"][0]["type"]) == ("<s>", "</s>")
    rest = [message["content"][0]["text"], message["tool_calls"]]
    assert "s>" not in str(rest) and "3, None" in str(rest)


def test_what_was_hidden_comes_back_in_the_stretch_that_it_was_said_in():
    # As a mark would be, were it not another character.
    said = "a<s>xb</s>\ue0001\ue000"
    hidden = spelled.hide([{"content": said}], SPECIALS)
    (message,) = hidden.messages
    text = f"<s>user {message['content']}</s><s>ok"
    assert list(hidden.pieces(text)) == [
        ("<s>", False),
        (f"user {said}", True),
        ("</s><s>ok", False),
    ]
