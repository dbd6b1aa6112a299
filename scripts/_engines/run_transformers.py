"""The drafter in transformers, as an assistant of its base: ``python run_transformers.py BASE DRAFTER PROMPT TOKENS``.

Prints one line of JSON. Runs in whatever interpreter has transformers; needs nothing of mtp-extract.
"""

# torch's own methods carry no type hints.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import transformers


def check(base: str, directory: str, prompt: str, tokens: int, drafts: int = 3) -> dict[str, Any]:
    """Greedy text with and without the drafter, in F32, and how many of its drafts were accepted."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    drafter = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    drafter.generation_config.num_assistant_tokens = drafts
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    inputs = tokenizer(prompt, return_tensors="pt")
    verified: list[int] = []
    forward = model.forward

    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        verified.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    with torch.no_grad():
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
        model.forward = counting
        assisted = model.generate(**inputs, do_sample=False, max_new_tokens=tokens, assistant_model=drafter)
    new = assisted[0, inputs["input_ids"].shape[1] :]
    return {
        "version": transformers.__version__,
        "identical": torch.equal(plain, assisted),
        # Each forward gives one token of the base's own; the first one reads the prompt, and no drafts.
        "drafted": sum(verified[1:]) - len(verified[1:]),
        "accepted": len(new) - len(verified),
        "text": tokenizer.decode(new),
    }


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
