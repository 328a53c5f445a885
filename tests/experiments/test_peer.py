"""The peer answers when asked, and stands still when it is not."""

import sys
import time

import pytest

from experiments import peer
from experiments.peer import Peer, PeerConfig
from kvmem import errors

RESTLESS = """
import json, sys, threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
for line in sys.stdin:
    asked = json.loads(line)
    if asked["job"] == "fall":
        sys.exit("the floor gave way")
    print(json.dumps({"said": asked, "argv": sys.argv[1:]}), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A peer without torch, one thread of which never rests."""
    script = tmp_path / "worker.py"
    script.write_text(RESTLESS)
    monkeypatch.setattr(peer, "_WORKER", script)
    return PeerConfig(python=sys.executable, threads=3)


def test_a_peer_answers_what_it_was_asked(worker, tmp_path):
    with Peer(worker, tmp_path / "x.gguf") as asked:
        assert asked.about["argv"] == [str(tmp_path / "x.gguf"), "3"]
        answer = asked.ask("prefill", prompt=[1, 2])
        assert answer["said"] == {"job": "prefill", "prompt": [1, 2]}


def test_a_peer_stands_still_between_jobs(worker, tmp_path):
    with Peer(worker, tmp_path) as asked:
        time.sleep(0.05)  # the signal travels
        before = asked.cpu_seconds()
        time.sleep(0.3)
        assert asked.cpu_seconds() == before
        asked.ask("again")


def test_a_peer_that_ends_is_told_with_its_own_words(worker, tmp_path):
    with Peer(worker, tmp_path) as asked:
        with pytest.raises(errors.KVMemError, match="code 1: the floor gave way"):
            asked.ask("fall")


def test_leaving_ends_the_process(worker, tmp_path):
    with Peer(worker, tmp_path) as asked:
        process = asked._process
    assert process.poll() is not None


def test_an_environment_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    config = PeerConfig(folder=str(tmp_path / "env"), requirements=("a==1", "b==2"))
    ran = []
    monkeypatch.setattr(peer, "_run", ran.append)
    monkeypatch.setattr(peer, "_base", lambda name: "python")

    def make() -> str:
        (tmp_path / "env").mkdir(exist_ok=True)
        return peer._made(config)

    monkeypatch.setattr(peer.shutil, "rmtree", lambda *_, **__: None)
    assert make().endswith("env/bin/python")
    assert ran[0] == ["python", "-m", "venv", str(tmp_path / "env")]
    assert ran[1][-2:] == ["a==1", "b==2"]
    make()
    assert len(ran) == 2


def test_a_base_that_is_nowhere_is_refused_in_words():
    with pytest.raises(errors.ConfigError, match="peer.base = 'python2.0'"):
        peer._base("python2.0")


def test_a_base_on_the_path_is_found():
    assert peer._base(sys.executable) == sys.executable
