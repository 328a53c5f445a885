"""A conversation goes on where it stood, in another process and on other ranks.

Tokens are bytes: a user's message of n letters is n + 7 tokens of a transcript.
"""

import dataclasses

import numpy as np
import pytest

from kvmem.serve import SamplingParams
from kvmem.session import chains as chain_files
from kvmem.store import row_files

CHUNK = 16
LETTERS = "The quick brown fox jumps over the lazy dog, and then it sleeps all day."


def said(num_tokens: int, seed: int = 0) -> str:
    """Return a text whose message is so many tokens."""
    words = np.random.default_rng(seed).permutation(list(LETTERS * 4))
    return "".join(words[: num_tokens - 7])


@pytest.mark.parametrize(
    ("prompt", "generated", "rows", "reused"),
    [(91, 10, 100, 96), (30, 10, 39, 32), (7 + 1, 1, 8, 0), (24, 9, 32, 32)],
)
def test_another_process_reuses_the_whole_chunks_and_answers_the_same(
    start, short, chain_of, prompt, generated, rows, reused
):
    sampling = SamplingParams(max_tokens=generated, ignore_eos=True)
    options = dataclasses.replace(short, sampling=sampling)
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=options)
    first = talk.say(said(prompt))
    assert (len(first.output.prompt_ids), first.resume.reason) == (prompt, "new")
    assert chain_of(me.session("s")).num_rows == rows

    conversations, me = start()
    talk = conversations.open(me.session("s"), options=options)
    again = talk.say(said(40, seed=1))
    assert (again.resume.num_reused, again.resume.reason) == (reused, None)
    assert again.output.cached_tokens == 0  # another process has no pages of it

    conversations, you = start(user="bob")  # nothing of it is found for another user
    talk = conversations.open(you.session("s"), options=options)
    talk.say(said(prompt))
    whole = talk.say(said(40, seed=1))
    assert whole.output.prompt_ids == again.output.prompt_ids
    assert whole.output.output_ids == again.output.output_ids


def test_a_text_that_differs_from_a_token_on_is_reused_before_it(start, short):
    conversations, me = start()
    conversations.open(me.session("a"), options=short).say(said(91))
    blob, _ = me.session("a").chains.get(None)
    edited = said(91)[:34] + "#" + said(91)[35:]  # token 6 + 34 is another
    for role, text in (("user", edited), ("assistant", "well")):
        me.session("b").append([{"role": role, "content": text}])
    me.session("b").chains.put(None, blob, 0)
    conversations, me = start()
    reply = conversations.open(me.session("b"), options=short).say("so?")
    assert reply.resume.num_reused == 32
    assert reply.resume.reason == "edited"


@pytest.mark.parametrize("placement", ["system", "tail"])
def test_memories_at_the_tail_leave_the_chain_as_it_was(start, short, placement):
    for color in ("amber", "blue", "cyan"):
        conversations, me = start()
        me.remember(f"the {color} door is for {color} guests, always", f"doors/{color}")
        options = dataclasses.replace(
            short, memories=1, placement=placement, system="s" * 55
        )
        talk = conversations.open(me.session("s"), options=options)
        before = me.session("s").chains.get(None)[0]
        reply = talk.say(f"what of the {color} door, please?")
        assert [e.uri for e in reply.recall.entries] == [f"doors/{color}"]
        if before is None:
            continue
        kept = reply.resume
        if placement == "system":
            assert kept.num_reused <= 64
            assert kept.reason == "edited"
        else:
            assert kept.num_reused == kept.num_expected > 64
            assert kept.reason is None


def test_users_share_nothing_and_sessions_of_one_user_do(start, short):
    conversations, me = start()
    first = conversations.open(me.session("a"), options=short).say(said(91))
    own = conversations.open(me.session("b"), options=short).say(said(91))
    other = conversations.sessions.principal("lab", "bob")
    theirs = conversations.open(other.session("a"), options=short).say(said(91))
    assert own.resume.num_reused > 0
    assert theirs.resume.num_reused == 0
    misses = (first.output.miss_reason, first.output.store_reason)
    assert (theirs.output.miss_reason, theirs.output.store_reason) == misses


def test_a_flipped_byte_shortens_the_chain_and_changes_no_answer(
    start, short, tmp_path, monkeypatch, chain_of
):
    monkeypatch.setattr(row_files, "FILE_NBYTES", 1)  # a file a row, to be hit alone
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    talk.say(said(97))
    chain = chain_of(me.session("s"))
    keys = chain.keys(talk.identity)
    assert len(keys) == 6
    held = conversations.pages.get(keys, np.asarray(chain.tokens[:96], np.int32))
    needle = held.records[2 * CHUNK].tobytes()[:64]
    (victim,) = [
        path
        for path in (tmp_path / "pages").rglob("*")
        if path.is_file() and needle in path.read_bytes()
    ]
    data = bytearray(victim.read_bytes())
    data[data.index(needle)] ^= 1
    victim.write_bytes(data)

    conversations, me = start()
    reply = conversations.open(me.session("s"), options=short).say("and now?")
    assert (reply.resume.num_reused, reply.resume.reason) == (32, "checksum")
    other = conversations.sessions.principal("lab", "bob")
    talk = conversations.open(other.session("s"), options=short)
    talk.say(said(97))
    assert talk.say("and now?").output.output_ids == reply.output.output_ids


def test_ranks_read_the_bytes_that_other_ranks_wrote(start, short, chain_of):
    conversations, me = start(tp=4, page_size=8)
    talk = conversations.open(me.session("s"), options=short)
    talk.say(said(91))
    chain = chain_of(me.session("s"))
    keys, tokens = chain.keys(talk.identity), np.asarray(chain.tokens[:96], np.int32)
    written = conversations.pages.get(keys, tokens).records
    for tp in (2, 1):
        conversations, me = start(tp=tp, page_size=32)
        engine = conversations.engine
        request = engine.add(chain.tokens, SamplingParams(4), talk.identity)
        engine.step()
        assert np.array_equal(engine.records(request)[:96], written)
        engine.abort(request)


def test_pages_of_other_weights_are_not_these(start, short, tiny_model):
    conversations, me = start()
    conversations.open(me.session("s"), options=short).say(said(91))
    _, loaded = tiny_model
    params = {name: array * 1.25 for name, array in loaded.params.items()}
    other = dataclasses.replace(loaded, params=params)
    conversations, me = start(loaded=other)
    reply = conversations.open(me.session("s"), options=short).say("hello?")
    assert (reply.resume.num_reused, reply.resume.reason) == (0, "format")


def test_a_process_that_dies_before_the_manifest_leaves_the_old_chain(
    start, short, monkeypatch, chain_of
):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    talk.say(said(91))
    before = chain_of(me.session("s"))

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(chain_files.Chains, "put", dies)
        with pytest.raises(KeyboardInterrupt):
            talk.say(said(91, seed=1))
    conversations, me = start()
    assert chain_of(me.session("s")) == before
    assert conversations.sessions.fsck(me.session("s")) == ()
    held = conversations.pages.stats().num_chunks
    assert held > 6  # pages came before the manifest
    assert conversations.collect().num_chunks == held - 6
    assert conversations.pages.contains(before.keys(talk.identity)) == 6


def test_a_manifest_ahead_of_its_log_is_cut_to_it(start, short, root):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    talk.say(said(91))
    talk.say(said(91, seed=1))
    (log,) = root.rglob("messages.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))  # the second turn is lost by hand
    conversations, me = start()
    session = me.session("s")
    broken = {violation.law for violation in conversations.sessions.fsck(session)}
    assert "I8" in broken
    reply = conversations.open(session, options=short).say("what now?")
    assert reply.resume.reason == "log_shorter"
    assert reply.resume.num_reused == 96


def test_a_damaged_manifest_costs_a_prefill(start, short, root):
    conversations, me = start()
    conversations.open(me.session("s"), options=short).say(said(91))
    (path,) = root.rglob("*.chain")
    path.write_bytes(path.read_bytes()[:-9])
    conversations, me = start()
    reply = conversations.open(me.session("s"), options=short).say("and?")
    assert reply.resume.reason == "damaged"
    assert reply.resume.num_reused > 0  # the pages are found by their tokens


def test_two_actors_go_on_from_what_all_said(start, short, chain_of):
    conversations, me = start()
    session = me.session("s")
    conversations.open(session, options=short).say(said(91))
    for actor in ("planner", "critic"):
        talk = conversations.open(session, actor, short)
        reply = talk.say(f"{actor}: " + said(50, seed=len(actor)))
        assert reply.resume.num_reused == 96
        talk.say(f"{actor} again: " + said(50, seed=3))
    planner, critic = (
        set(chain_of(session, actor).keys(talk.identity))
        for actor in ("planner", "critic")
    )
    assert len(planner & critic) == 6
    conversations.drop(session, "planner")
    left = chain_of(session, "critic").keys(talk.identity)
    assert conversations.pages.contains(left) == len(left)
    gone = planner - critic
    assert gone
    assert all(not conversations.pages.contains([key]) for key in gone)
    conversations, me = start()
    reply = conversations.open(me.session("s"), "critic", short).say("go on")
    assert reply.resume.reason is None


def test_a_message_that_leaves_no_room_is_refused_and_not_logged(start, short):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    with pytest.raises(ValueError, match="commit"):
        talk.say("x" * 800)
    assert me.session("s").clock == 0


def test_a_turn_said_again_under_its_key_is_stored_once(start, short):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    first = talk.say("hello", key="turn-1")
    talk.say("and more", key="turn-2")
    again = talk.say("hello", key="turn-1")
    assert me.session("s").clock == 4
    assert (again.text, again.output) == (first.text, None)


def test_a_turn_that_was_cut_off_is_answered_when_it_is_said_again(
    start, short, monkeypatch
):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    turn = talk.turn("hello", key="turn-1")
    stream = turn.deltas()
    next(stream)
    stream.close()  # whoever listened has gone
    assert me.session("s").clock == 1
    assert not conversations.engine.scheduler.has_work
    again = talk.say("hello", key="turn-1")
    assert me.session("s").clock == 2
    assert again.output is not None
