"""Logits of tiny hybrids as transformers computes them: the judge of our decoders.

Two runs, because torch and jax need not share an environment. The first draws the
models of `tests/model/hybrid/conftest.py` and writes their tensors; the second, where
torch and transformers 5.24 are, loads them into the published modelling code with a
dense MLP in place of experts, and writes `hybrids.json`.

    python tests/golden/hybrids.py draw /tmp/hybrids
    python tests/golden/hybrids.py judge /tmp/hybrids
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np

FAMILIES = ("gpt_oss", "gemma3", "deepseek_v32", "qwen3_next")
HERE = pathlib.Path(__file__).parent
AT = (6, 13, 23)  # the positions whose logits are kept
NUM_IDS = 24


def draw(folder: pathlib.Path) -> None:
    """Write each model's tensors, facts and tokens."""
    from kvmem import settings
    from kvmem.model.hybrid import random_model

    path = HERE.parent / "model" / "hybrid" / "conftest.py"
    spec = importlib.util.spec_from_file_location("hybrid_conftest", path)
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(7).integers(0, 256, (3, 24)).astype(np.int32)
    for family in FAMILIES:
        facts = fixtures.facts(family)
        model = random_model.make(settings.Table(facts), seed=3)
        extra = {"_facts": json.dumps(facts), "_tokens": tokens}
        np.savez(folder / f"{family}.npz", **extra, **model.params)


def judge(folder: pathlib.Path) -> None:
    """Compute the logits of each drawn model and keep some of them."""
    import torch
    import transformers

    found = {"transformers": transformers.__version__}
    for family in FAMILIES:
        kept = np.load(folder / f"{family}.npz")
        facts, tokens = json.loads(str(kept["_facts"])), kept["_tokens"]
        params = {k: torch.tensor(kept[k]) for k in kept.files if k[0] != "_"}
        model = _published(family, facts).float().eval()
        tensors = dict(_renamed(facts, params))
        result = model.load_state_dict(tensors, strict=False)
        strange = [k for k in result.missing_keys if ".mlp." not in k]
        assert not strange and not result.unexpected_keys, (family, result)
        for index, layer in enumerate(model.model.layers):
            layer.mlp = _dense(family, params, f"model.layers.{index}.mlp.")
        with torch.no_grad():
            logits = model(torch.tensor(tokens).long(), use_cache=False).logits
        some = logits[:, AT, :NUM_IDS].numpy().astype(float)
        found[family] = np.round(some, 5).tolist()
    (HERE / "hybrids.json").write_text(json.dumps(found) + "\n")


def _published(family: str, facts: dict):
    """Make the published model of a family; a rope is what its config spells."""
    import transformers

    fields = {k: v for k, v in facts.items() if k not in ("model_type", "rope_theta")}
    few = {"num_experts_per_tok": 1, "tie_word_embeddings": False}

    def rope(theta: float, **more) -> dict:
        block = {"rope_type": "default", "rope_theta": theta, **more}
        return {"rope_parameters": block}

    if family == "gpt_oss":
        more = few | {"num_local_experts": 2, "attention_bias": True}
        config = transformers.GptOssConfig(**fields, **more, **rope(150_000.0))
        made = transformers.GptOssForCausalLM
    elif family == "gemma3":
        config = transformers.Gemma3TextConfig(**fields)
        made = transformers.Gemma3ForCausalLM
    elif family == "deepseek_v32":
        heads = facts["num_attention_heads"]
        more = {"num_key_value_heads": heads, "first_k_dense_replace": 9}
        more |= {"tie_word_embeddings": False}
        config = transformers.DeepseekV32Config(**fields, **more, **rope(10_000.0))
        made = transformers.DeepseekV32ForCausalLM
    else:
        more = few | {"num_experts": 2, "moe_intermediate_size": 8}
        more |= {"shared_expert_intermediate_size": 8}
        turned = rope(10_000_000.0, partial_rotary_factor=0.25)
        config = transformers.Qwen3NextConfig(**fields, **more, **turned)
        made = transformers.Qwen3NextForCausalLM
    config._attn_implementation = "eager"
    return made(config)


def _renamed(facts: dict, params: dict):
    """Yield our tensors under the names, and in the order, of the published code."""
    yield (
        "lm_head.weight",
        params.get("lm_head.weight", params["model.embed_tokens.weight"]),
    )
    for name, tensor in params.items():
        if ".mixer." not in name and ".mlp." not in name:
            yield name, tensor
    for index in range(facts["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        own = {
            name.removeprefix(f"{prefix}mixer."): tensor
            for name, tensor in params.items()
            if name.startswith(f"{prefix}mixer.")
        }
        if "a_log" in own:
            yield from _delta_net(facts, own, f"{prefix}linear_attn.")
            continue
        for name, tensor in own.items():
            name = name.replace("kv_a_proj.", "kv_a_proj_with_mqa.")
            yield f"{prefix}self_attn.{name}", tensor


def _delta_net(facts: dict, own: dict, prefix: str):
    """Yield a delta net's tensors; the published code joins them a key head."""
    import torch

    heads, hidden = facts["linear_num_key_heads"], facts["hidden_size"]

    def joined(names: str):
        parts = [own[f"{n}_proj.weight"].view(heads, -1, hidden) for n in names]
        return torch.cat(parts, dim=1).reshape(-1, hidden)

    yield f"{prefix}in_proj_qkvz.weight", joined("qkvz")
    yield f"{prefix}in_proj_ba.weight", joined("ba")
    convs = [own[f"conv_{name}.weight"] for name in "qkv"]
    yield f"{prefix}conv1d.weight", torch.cat(convs)[:, None]
    names = {"a_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm.weight"}
    for ours, theirs in (names | {"o_proj.weight": "out_proj.weight"}).items():
        yield f"{prefix}{theirs}", own[ours]


def _dense(family: str, params: dict, prefix: str):
    """Return the dense MLP that stands where the published model has experts."""
    import torch
    from torch.nn import functional

    gate, up, down = (
        params[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")
    )

    class Dense(torch.nn.Module):
        def forward(self, x):
            if family == "gemma3":
                act = functional.gelu(x @ gate.T, approximate="tanh")
            else:
                act = functional.silu(x @ gate.T)
            out = (act * (x @ up.T)) @ down.T
            return (out, None) if family == "gpt_oss" else out

    return Dense()


if __name__ == "__main__":
    {"draw": draw, "judge": judge}[sys.argv[1]](pathlib.Path(sys.argv[2]))
