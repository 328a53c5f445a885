import numpy as np
import pytest

from kvmem import config
from kvmem.errors import ConfigError
from kvmem.model.hybrid import random_model
from kvmem.model.hybrid.spec import HybridSpec

TINY = ["gpt_oss", "gemma3", "deepseek_v32", "qwen3_next"]


def test_a_seed_and_facts_are_a_model_whatever_it_is_called(facts_of, model_of):
    model = model_of("qwen3_next")
    again = random_model.make(facts_of("qwen3_next"), seed=3, name="another name")
    other = random_model.make(facts_of("qwen3_next"), seed=4)
    longer = facts_of("qwen3_next", max_position_embeddings=9_999)
    assert again.model_id == model.model_id != other.model_id
    assert random_model.make(longer, seed=3).model_id == model.model_id
    wider = facts_of("qwen3_next", rope_theta=9.0)
    assert random_model.make(wider, seed=3).model_id != model.model_id


def test_no_tensor_depends_on_how_many_there_are(facts_of, model_of):
    deeper = random_model.make(facts_of("qwen3_next", num_hidden_layers=3), seed=3)
    for name, array in model_of("qwen3_next").params.items():
        np.testing.assert_array_equal(deeper.params[name], array, name)


def test_a_model_is_drawn_in_the_dtype_asked_for(facts_of):
    half = random_model.make(facts_of("gpt_oss"), seed=3, dtype="bfloat16")
    assert half.dtype == "bfloat16"
    assert {array.dtype.name for array in half.params.values()} == {"bfloat16"}
    assert half.spec.parameters() == {k: a.shape for k, a in half.params.items()}


def test_tokens_are_bytes_and_one_id_ends_a_text(model_of):
    tokenizer = model_of("gpt_oss").tokenizer
    ids = tokenizer.encode("héllo <eos>")
    assert len(ids) == 6 + 1 + 1 and ids[-1] == 256 == tokenizer.max_id
    assert tokenizer.decode(ids, skip_special_tokens=False) == "héllo <eos>"
    assert tokenizer.eos_ids == (256,)
    again = random_model.byte_tokenizer((256,))
    assert again.identity == tokenizer.identity


def test_a_vocabulary_without_room_for_bytes_is_refused(facts_of):
    with pytest.raises(ConfigError, match="Set vocab_size to 257 or more"):
        random_model.make(facts_of("gpt_oss", vocab_size=256), seed=0)


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_configs_are_models_that_run_at_tp_1_2_and_4(name, repo_root):
    path = repo_root / "configs" / "models" / f"{name}_tiny.toml"
    for tp in (1, 2, 4):
        loaded = config.load(path, [f"topology.tp={tp}"], env={})
        assert isinstance(loaded.spec, HybridSpec)
        assert loaded.partition.num_elements < 500_000
        assert len(loaded.groups()) == 2
        assert loaded.budget().used_nbytes > 0
    model = loaded.model.load()
    assert model.spec == loaded.spec
    assert model.nbytes < 2**22
