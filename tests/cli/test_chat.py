"""`kvmem chat` goes on where it stood, and knows what it was told."""

import io

import pytest

from experiments import tiny_decoder
from kvmem import cli


@pytest.fixture
def chat(tmp_path, monkeypatch, capsys):
    """Return `chat(lines, *arguments)`: what a process prints that is told them."""
    source = tiny_decoder.write(tmp_path / "tiny")
    path = tmp_path / "chat.toml"
    path.write_text(
        f'[model]\nsource = "{source}"\nkv_dtype = "float32"\n'
        "[pool]\npage_size = 16\npages = 64\n"
        "[serve]\nmax_batch = 1\nmax_length = 512\nprefill_chunk = 128\n"
        "chunks = [128]\nwidths = [512]\n"
    )
    root = str(tmp_path / "root")

    def chat(lines: list[str], *more: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        argv = ["chat", str(path), "--session", "s", "--root", root]
        assert cli.main([*argv, "--max-tokens", "6", *more]) == 0
        said = capsys.readouterr().out.splitlines()
        return [line for line in said if line.startswith("[") and line.endswith("]")]

    return chat


def test_a_second_process_reuses_what_the_first_computed(chat):
    greeting, told, said = chat(
        ["/remember Tea is served at ten.", "Please say when tea is served to us."]
    )
    assert greeting == "[s: 0 messages, no KV to go on from (new)]"
    uri = told.removeprefix("[remembered as ").removesuffix("]")
    assert f"recalled {uri}; reused 0 of" in said
    greeting, who, said = chat(["/who", "And again?"])
    assert greeting.startswith("[s: 2 messages, KV of ")
    assert who == f"[me of local; memories: {uri}]"
    assert "recalled nothing; reused 64 of" in said
    greeting, gone, who = chat([f"/forget {uri}", "/who"])
    assert gone == f"[forgotten: {uri}]"
    assert who == "[me of local; memories: none]"
    greeting, *_ = chat(["/quit", "never read"])
    assert greeting == "[s: 4 messages, KV of 32 tokens]"


def test_a_refusal_is_said_and_the_chat_goes_on(chat):
    _, help, refused, said = chat(["/what", "x" * 600, "hello"])
    assert help == "[/remember TEXT, /forget URI, /who, /quit]"
    assert "commit" in refused
    assert "reused 0 of" in said


def test_memories_of_one_actor_are_not_recalled_for_another(chat):
    chat(["/remember Tea is served at ten."], "--actor", "planner")
    _, said = chat(["When is tea served?"], "--actor", "critic")
    assert "recalled nothing" in said
    _, said = chat(["When is tea served?"], "--actor", "planner")
    assert "recalled peers/planner" in said


def test_bytes_that_are_no_text_end_no_chat(chat, monkeypatch):
    raw = io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n/who\n"), encoding="utf-8")
    monkeypatch.setattr(io, "StringIO", lambda _: raw)
    _, said, who = chat([])
    assert "reused 0 of" in said
    assert who == "[me of local; memories: none]"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("the disk is full")])
def test_a_reply_that_is_stopped_ends_no_chat(chat, monkeypatch, stop):
    def stops(*_):
        raise stop

    with monkeypatch.context() as patched:
        patched.setattr("kvmem.conversation.turn.TurnInProgress.deltas", stops)
        _, said, who = chat(["hello", "/who"])
    assert said in ("[stopped]", "[the disk is full]")
    assert who == "[me of local; memories: none]"
    assert chat(["and now?"])[0].startswith("[s: 1 messages, no KV")


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--memories", "-1"], "memories=-1"), (["--cooldown", "-1"], "-1")],
)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(
    capsys, argv, words
):
    assert cli.main(["chat", "no.toml", "--session", "s", *argv]) == 2
    assert words in capsys.readouterr().err
