"""`kvmem sessions`: keys are shown once, and the service runs until it is told."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from kvmem import cli
from kvmem.session.client import Client
from kvmem.session.keys import KeyRing


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """Run `kvmem sessions …` on a root; return its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "160")

    def ask(*argv: str) -> tuple[int, str]:
        code = cli.main(["sessions", *argv, "--root", str(tmp_path)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return ask


def test_a_key_is_printed_once_listed_without_its_secret_and_taken_back(ask, tmp_path):
    code, token = ask("keys", "add", "--account", "lab", "--user", "ann")
    ring = KeyRing(tmp_path)
    assert code == 0 and ring.find(token.strip()).user == "ann"
    _, id_, secret = token.strip().split("_", 2)
    code, said = ask("keys", "list")
    assert code == 0 and id_ in said and "ann" in said and secret not in said
    assert ask("keys", "revoke", "--key", id_)[0] == 0
    assert ring.find(token.strip()) is None
    assert ask("keys", "revoke", "--key", id_)[0] == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["keys"], "its actions are serve, keys add"),
        (["serve", "keys"], "its actions are serve, keys add"),
        (["keys", "add", "--user", "ann"], "it needs --account"),
        (["keys", "list", "--user", "ann"], "no use for that"),
        (["serve", "--key", "x"], "no use for that"),
        (["serve", "--port", "70000"], "ports are 0 to 65535"),
        (["keys", "add", "--account", "lab", "--user", "a/b"], "user 'a/b'"),
    ],
)
def test_what_has_no_meaning_is_bad_input(ask, argv, words):
    code, said = ask(*argv)
    assert code == 2 and words in said


def test_an_address_where_nothing_can_listen_is_bad_input(ask):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = ask("serve", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "nothing can listen there" in said and "--port" in said
    code, said = ask("serve", "--host", "no.such.host.invalid")
    assert code == 2 and "nothing can listen there" in said


def test_the_service_answers_until_it_is_interrupted(tmp_path):
    key = KeyRing(tmp_path).add("lab", "ann")
    command = [sys.executable, "-m", "kvmem.cli", "sessions", "serve"]
    options = ["--root", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    ) as server:
        url = server.stdout.readline().split()[-1]
        with Client(url, key) as me:
            me.session("s").append([{"role": "user", "content": "hello"}])
            assert [m.text for m in me.session("s").messages()] == ["hello"]
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0
        assert server.stderr.read() == ""
