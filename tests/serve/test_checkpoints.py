"""Any checkpoint directory of the family is served as transformers computes it.

Directories are written here; `tests/golden/checkpoints.json` holds what transformers
said of the very same bytes (its `source` line names the versions).
"""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from kvmem.config import Config, ModelConfig, PoolConfig
from kvmem.geometry import Topology
from kvmem.model import load_safetensors
from kvmem.serve import SamplingParams, ServeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm")
TOLERANCE = 2e-4  # the golden numbers have four places
ONE_SHAPE = ServeConfig(  # one prefill and one decode program an engine
    max_batch=1,
    max_length=64,
    prefill_chunk=16,
    batches=(1,),
    chunks=(16,),
    widths=(64,),
    prefix_cache=False,
)


@pytest.fixture(scope="session")
def checkpoints(repo_root):
    """The file that writes the directories, and computed the golden numbers."""
    path = repo_root / "tests" / "golden" / "checkpoints.py"
    found = importlib.util.spec_from_file_location("checkpoints", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden(checkpoints):
    return json.loads(checkpoints.GOLDEN.read_text("utf-8"))


@pytest.fixture(scope="session")
def directory(checkpoints, tmp_path_factory):
    """Write the checkpoint of a family; changes are made by the caller."""

    def make(name):
        return checkpoints.write(tmp_path_factory.mktemp(name) / name, name)

    return make


class Listening:
    """A stepper that remembers the logits of every step; all else is its own."""

    def __init__(self, stepper):
        self.stepper = stepper
        self.heard = []

    def __call__(self, pool, batch):
        pool, logits = self.stepper(pool, batch)
        self.heard.append(np.asarray(logits)[0])
        return pool, logits

    def __getattr__(self, name):
        return getattr(self.stepper, name)


def made(folder, tp=1, dtype="float32", kv_dtype="float32", order="head_major"):
    """Return the config of an engine of a checkpoint directory."""
    return Config(
        model=ModelConfig(str(folder), dtype, kv_dtype),
        topology=Topology(tp),
        pool=PoolConfig(page_size=8, pages=8, order=order, poison=True, checked=True),
        serve=ONE_SHAPE,
    )


def served(folder, *, model=None, **changes):
    """Return an engine of a checkpoint directory; its steps are listened to."""
    engine = made(folder, **changes).engine(model)
    engine.stepper = Listening(engine.stepper)
    return engine


def first_logits(engine, prompt):
    """Return the logits after the prompt, the vocabulary's own rows."""
    engine.stepper.heard.clear()
    engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return engine.stepper.heard[-1][: engine.model.spec.vocab]


def assert_continues(engine, prompt, expected):
    """Hold tokens, text and log-probabilities of a continuation to those expected."""
    count = len(expected["output_ids"])
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=1)
    (output,) = engine.generate([prompt], sampling)
    assert list(output.prompt_ids) == expected["prompt_ids"]
    assert list(output.output_ids) == expected["output_ids"]
    assert output.text == expected["text"]
    ours = [probs.logprob for probs in output.completions[0].logprobs]
    np.testing.assert_allclose(ours, expected["logprobs"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(directory, family):
    return directory(family)


@pytest.fixture(scope="module")
def engine(folder):
    return served(folder)


def test_the_directory_is_the_one_that_transformers_read(
    checkpoints, golden, folder, family
):
    assert checkpoints.digest(folder) == golden[family]["digest"], (
        "tests/golden/checkpoints.py writes other bytes than it did: run it where "
        "transformers is installed"
    )


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_greedy_tokens_are_those_of_transformers(
    checkpoints, golden, engine, family, kind
):
    expected = golden[family][kind]
    assert min(expected["margins"]) > 20 * TOLERANCE  # no tie decides
    assert_continues(engine, checkpoints.PROMPTS[kind], expected)


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_logits_after_the_prompt_are_those_of_transformers(
    checkpoints, golden, engine, family, kind
):
    found = first_logits(engine, checkpoints.PROMPTS[kind])
    wanted = golden[family][kind]["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "tp"), [("qwen2", 2), ("smollm", 3)])
def test_ranks_together_give_the_tokens_of_transformers(
    checkpoints, golden, directory, name, tp
):
    engine = served(directory(name), tp=tp, order="token_major")
    assert engine.pool.pages.shape[0] == tp
    assert_continues(engine, checkpoints.PROMPTS["text"], golden[name]["text"])


def test_pages_of_bfloat16_stay_near_the_logits_of_transformers(
    checkpoints, golden, directory
):
    engine = served(directory("llama"), kv_dtype="bfloat16")
    found = first_logits(engine, checkpoints.PROMPTS["ids"])
    wanted = np.asarray(golden["llama"]["ids"]["logits"])
    assert 1e-5 < np.abs(found - wanted).max() < 0.1


def test_a_checkpoint_is_served_in_the_dtypes_that_it_declares(directory):
    config = made(directory("mistral"), dtype=None, kv_dtype=None)
    engine = config.engine()
    (output,) = engine.generate("Plain words.", SamplingParams(max_tokens=1))
    assert len(output.output_ids) == 1
    assert config.model.cache_dtype() == config.model.weight_dtype() == "bfloat16"
    assert engine.stepper.weights.rank_nbytes == config.weight_nbytes
    assert engine.pool.pages.nbytes == config.budget().used_nbytes


def without_scaling(folder):
    """Rewrite a checkpoint's config as if its frequencies were plain."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    block = config.pop("rope_parameters", config)
    config["rope_theta"] = block["rope_theta"]
    assert config.pop("rope_scaling", None) or block["rope_type"] == "yarn"
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_rope_that_was_not_scaled_would_be_seen(checkpoints, golden, directory, name):
    folder = directory(name)
    without_scaling(folder)
    found = first_logits(served(folder), checkpoints.PROMPTS["ids"])
    assert np.abs(found - golden[name]["ids"]["logits"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "part"),
    [("qwen2", "_proj.bias"), ("qwen3", "q_norm"), ("qwen3", "k_norm")],
)
def test_a_bias_or_a_norm_that_was_left_out_would_be_seen(
    checkpoints, golden, directory, name, part
):
    folder = directory(name)
    model = load_safetensors.load(folder)
    neutral = 0.0 if part.endswith("bias") else 1.0
    params = {
        tensor: np.full_like(array, neutral) if part in tensor else array
        for tensor, array in model.params.items()
    }
    engine = served(folder, model=dataclasses.replace(model, params=params))
    found = first_logits(engine, checkpoints.PROMPTS["ids"])
    assert np.abs(found - golden[name]["ids"]["logits"]).max() > 100 * TOLERANCE
