"""`kvmem blend check` measures a model against its own full recompute, and judges."""

import dataclasses
import json

import pytest

from kvmem import cli, config, errors
from kvmem.blend import Verdict, texts
from kvmem.serve import blend_check

TINY = """
[model]
seed = 3
kv_dtype = "float32"

[model.facts]
model_type = "{kind}"
vocab_size = 257
max_position_embeddings = 1024
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
eos_token_id = 256
{more}

[pool]
pages = 300
page_size = 4

[serve]
max_batch = 1
max_length = 256
batches = [1]
chunks = [64]
prefill_chunk = 64
widths = [256]
"""
LATENT = """
q_lora_rank = 16
kv_lora_rank = 128
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
index_n_heads = 2
index_head_dim = 128
index_topk = 24
"""
STATE = """
num_key_value_heads = 2
full_attention_interval = 2
head_dim = 16
linear_num_key_heads = 4
linear_num_value_heads = 4
linear_key_head_dim = 8
linear_value_head_dim = 8
linear_conv_kernel_dim = 4
"""
SMALL = ["--tokens", "96", "--prompts", "2", "--answer", "4"]


@pytest.fixture
def toml(tmp_path):
    def write(kind, more, extra=""):
        path = tmp_path / "tiny.toml"
        path.write_text(TINY.format(kind=kind, more=more) + extra)
        return str(path)

    return write


@pytest.mark.long
def test_a_latent_model_is_checked_by_its_name_of_what_is_stale(toml, tmp_path, capsys):
    path, out = toml("deepseek_v32", LATENT), tmp_path / "gates" / "tiny.json"
    sets = ["--set", "blend.allow_stale_selector=true", "--set", "blend.min_tokens=8"]
    sets += ["--set", f"store.root={tmp_path / 'store'}"]
    loose = [*sets, "--set", "blend.min_agreement=0", "--set", "blend.max_kl=100"]
    assert cli.main(["blend", "check", path, *loose, *SMALL, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "selectors at old places" in said and "passes" in said
    record = json.loads(out.read_text())
    assert record["stale_selector"] == [f"layers.{n}.indexer" for n in range(2)]
    assert record["num_texts"] == 2 and record["num_tokens"] == 8
    assert 0 <= record["agreement"] <= 1 and record["kl"] >= 0
    assert record["blended_s"] > 0 and record["recomputed_s"] > 0
    assert not (tmp_path / "store").exists(), "what is kept is not timed, nor kept"


def test_an_engine_with_a_store_is_not_checked(toml, tmp_path):
    """Its second answer would come from there, and be timed as computed."""
    sets = [f"store.root={tmp_path / 'store'}", "blend.allow_stale_selector=true"]
    loaded = config.load(toml("deepseek_v32", LATENT), sets)
    with loaded.engine(gated=False) as engine:
        with pytest.raises(errors.ConfigError, match="in an engine with a store"):
            blend_check.check(engine, (), {})


VERDICT = Verdict(
    model_id="m" * 64,
    kv_dtype="float32",
    ratio=0.15,
    check_layer=1,
    stale_selector=(),
    num_texts=2,
    num_tokens=8,
    agreement=0.95,
    first_agreement=1.0,
    kl=0.02,
    blended_s=0.5,
    recomputed_s=2.0,
)
STALE = ["--set", "blend.allow_stale_selector=true"]


@pytest.mark.parametrize(("agreement", "code"), [(0.95, 0), (0.85, 1)])
def test_a_model_below_the_limits_ends_with_1(
    toml, capsys, monkeypatch, agreement, code
):
    found = dataclasses.replace(VERDICT, agreement=agreement)
    monkeypatch.setattr(blend_check, "check", lambda *_: found)
    path = toml("deepseek_v32", LATENT)
    assert cli.main(["blend", "check", path, *STALE, *SMALL, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["passed"] is (code == 0)
    assert cli.main(["blend", "check", path, *STALE, *SMALL]) == code
    said = capsys.readouterr().out
    assert ("does not pass: 0.850 of the next tokens" in said) == (code == 1)
    assert "blended is faster by" in said and "4.00" in said


def test_an_engine_blends_by_the_record_of_its_own_model(toml, tmp_path):
    path, record = toml("deepseek_v32", LATENT), tmp_path / "gate.json"
    sets = ["blend.allow_stale_selector=true", f"blend.gate={record}"]
    loaded = config.load(path, sets, env={})
    model = loaded.model.load()
    record.write_text(json.dumps(VERDICT.as_json()))
    with pytest.raises(errors.IncompatiblePlan, match="of model_id mmmm"):
        loaded.engine(model)
    own = dataclasses.replace(VERDICT, model_id=model.model_id)
    record.write_text(json.dumps(own.as_json()))
    assert loaded.engine(model).blender.config == loaded.blend
    with pytest.raises(errors.IncompatiblePlan, match="of ratio 0.15, and this is 0.2"):
        config.load(path, [*sets, "blend.ratio=0.2"], env={}).engine(model)


@pytest.mark.parametrize(
    ("kind", "more", "law"),
    [
        ("deepseek_v32", LATENT, "keys of layers.0.indexer, layers.1.indexer"),
        ("qwen3_next", STATE, "recurrent layers (layers.0)"),
    ],
)
def test_a_model_that_cannot_blend_is_refused_by_its_law(
    toml, kind, more, law, capsys, monkeypatch
):
    monkeypatch.setattr("kvmem.model.hybrid.random_model.make", None)
    assert cli.main(["blend", "check", toml(kind, more), *SMALL]) == 2
    assert law in " ".join(capsys.readouterr().err.split())


def test_published_facts_are_refused_by_every_law(repo_root, capsys):
    path = str(repo_root / "configs" / "models" / "deepseek_v32.toml")
    assert cli.main(["blend", "check", path, "--tokens", "100"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Hadamard" in said and "facts say how much a cache keeps" in said


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--prompts", "0"], "--prompts below 1"),
        (["--tokens", "5000"], "serve.max_length is 256"),
        (["--texts", "/no/such/file"], "texts to blend"),
        (["--set", "blend.ratio=2"], "ratio <= 1"),
        (["--set", "blend.chunk=2"], "blend.chunk_tokens"),
    ],
)
def test_bad_input_is_refused_before_any_weight_is_read(
    toml, more, complaint, capsys, monkeypatch
):
    monkeypatch.setattr("kvmem.model.hybrid.random_model.make", None)
    path = toml("deepseek_v32", LATENT)
    assert cli.main(["blend", "check", path, *SMALL, *more]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_a_config_that_blends_wants_a_gate_before_any_weight(toml, monkeypatch):
    monkeypatch.setattr("kvmem.model.hybrid.random_model.make", None)
    path = toml("deepseek_v32", LATENT, "\n[blend]\nallow_stale_selector = true\n")
    with pytest.raises(errors.IncompatiblePlan, match="without a gate"):
        config.load(path, env={}).engine()


def test_every_order_has_every_question_before_a_prompt_comes_again():
    corpus = texts.python_topics()
    prompts = texts.arranged(corpus, lambda text: [*text.encode()], 90, 12)
    assert len({prompt.tokens for prompt in prompts}) == 12
    assert len({prompt.order for prompt in prompts[:6]}) == 6
    assert len({prompt.question for prompt in prompts[:6]}) == 3


def test_own_texts_are_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 50)
    corpus = texts.files([tmp_path / "a", tmp_path / "b"], "What?")
    prompts = texts.arranged(corpus, lambda text: [*text.encode()], 60, 2)
    assert {prompt.order for prompt in prompts} == {("a", "b"), ("b", "a")}
    assert bytes(prompts[0].tokens).decode().count("a" * 30) == 1
    with pytest.raises(errors.ConfigError, match="1 text to blend"):
        texts.files([tmp_path / "a"], "What?")
