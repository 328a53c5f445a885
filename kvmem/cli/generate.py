"""Continue a prompt, printing text as it comes.

    kvmem generate configs/models/smollm2.toml --prompt "The capital of France is"

Greedy unless a temperature is given.
"""

import dataclasses
import json
import os

import tyro

from kvmem import config, console, errors
from kvmem.serve import SamplingParams

__all__ = ["Arguments", "run"]

_SAMPLING = SamplingParams()


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Continue a prompt, printing text as it comes.

    Args:
        path: a TOML config.
        prompt: the text to continue.
        chat: take the prompt as a user's message, through the model's chat template.
        max_tokens: tokens to generate at most.
        greedy: take the most likely token; refuses a temperature.
        temperature: logits are divided by it; 0 is greedy.
        top_k: sample among the k most likely tokens; 0 means among all.
        top_p: sample among the most likely tokens whose probability reaches p.
        seed: decides what is sampled.
        stop: a text that ends the output; may be repeated.
        ignore_eos: go on past the model's end-of-text ids.
        json: print prompt_ids, output_ids and text as JSON.
    """

    path: tyro.conf.Positional[str]
    prompt: str
    chat: bool = False
    max_tokens: int = _SAMPLING.max_tokens
    greedy: bool = False
    temperature: float = _SAMPLING.temperature
    top_k: int = _SAMPLING.top_k
    top_p: float = _SAMPLING.top_p
    seed: int = _SAMPLING.seed
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = _SAMPLING.stop
    ignore_eos: bool = _SAMPLING.ignore_eos
    set: console.Overrides = ()
    json: bool = False


def run(arguments: Arguments) -> int:
    """Generate, as text that comes or as one JSON object."""
    sampling = _sampling(arguments)
    engine = config.load(arguments.path, arguments.set, os.environ).engine()
    prompt: str | list[int] = arguments.prompt
    if arguments.chat:
        message = {"role": "user", "content": arguments.prompt}
        prompt = engine.tokenizer.apply_chat([message])
    if arguments.json:
        (output,) = engine.generate([prompt], sampling)
        shown = {
            "prompt_ids": list(output.prompt_ids),
            "output_ids": list(output.output_ids),
            "text": output.text,
        }
        print(json.dumps(shown))
        return console.DONE
    for delta in engine.stream(prompt, sampling):
        print(delta.text, end="", flush=True)
    print()
    return console.DONE


def _sampling(arguments: Arguments) -> SamplingParams:
    if arguments.greedy and arguments.temperature != 0:
        raise errors.ConfigError(
            errors.say(
                f"--greedy with --temperature {arguments.temperature}",
                "greedy takes the most likely token, whatever the temperature",
                "Give one of the two",
            )
        )
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given = dataclasses.asdict(arguments)
    return SamplingParams(**{k: v for k, v in given.items() if k in names})
