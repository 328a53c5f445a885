"""The peer: Hugging Face transformers on torch, alone in its own process.

Started by `peer.py` with another interpreter, so it imports nothing of kvmem. Jobs come
in as lines of JSON and answers go out the same way. The law: the peer is spared all it
can be. It runs as the library comes (eager, SDPA, its own growing cache) under
inference mode, computes logits of the last position only, and its clock stands around
the model and the choice of a token alone.

    {"job": "prefill", "prompt": [504, 3575]}   ->   {"seconds": 0.11}
"""

import ctypes
import json
import os
import signal
import sys
import time

import torch
import transformers

_PR_SET_PDEATHSIG = 1


class Peer:
    """One model and the jobs that it can do."""

    def __init__(self, gguf_path, threads):
        """Load the weights of a GGUF file in float32."""
        torch.set_num_threads(threads)
        folder, name = os.path.split(gguf_path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32
        ).eval()

    def about(self):
        """Say what runs."""
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "dtype": str(self.model.dtype),
        }

    def prefill(self, prompt):
        """Time one prompt, from its ids to its next token."""
        start = time.perf_counter()
        logits, _ = self._read([prompt], None)
        token = logits.argmax(-1).tolist()
        return {"seconds": time.perf_counter() - start, "tokens": token}

    def decode(self, prompts, steps, warm_up):
        """Time each of `steps` greedy steps of prompts of one length."""
        logits, cache = self._read(prompts, None)
        tokens = logits.argmax(-1).tolist()
        seconds = []
        for _ in range(warm_up + steps):
            start = time.perf_counter()
            logits, cache = self._read([[token] for token in tokens], cache)
            tokens = logits.argmax(-1).tolist()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds[warm_up:]}

    def greedy(self, prompt, tokens):
        """Continue a prompt; each token with the margin of the best logit."""
        ids, margins, fed, cache = [], [], prompt, None
        for _ in range(tokens):
            logits, cache = self._read([fed], cache)
            best, second = logits[0].topk(2).values.tolist()
            margins.append(best - second)
            ids.append(int(logits[0].argmax()))
            fed = ids[-1:]
        return {"ids": ids, "margins": margins}

    @torch.inference_mode()
    def _read(self, rows, cache):
        """Read rows of ids after a cache; logits of the last place, and the cache."""
        out = self.model(
            torch.tensor(rows),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1], out.past_key_values


def main():
    """Answer jobs until the parent closes our input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.platform == "linux":  # a stopped process must not outlive its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(peer, asked.pop("job"))(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
