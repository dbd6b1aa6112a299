"""The loop beside transformers' assisted generation and the base alone: tokens a CPU second, and the same text.

    python scripts/bench_rounds.py [DRAFTER_DIR BASE_DIR] [--prompts N] [--drafts K]

Without directories it is the sample's pair. One thread, one text at a time, all three in turn for every text.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluate.prompts import encode_prompts, read_prompts, shipped_prompts, spread
from mtp_extract.speculate.loop import SpeculativeGenerator

TOKENS = 64


def ways(generator: SpeculativeGenerator, assistant: Any, drafts: int) -> dict[str, Callable[[Any], tuple[int, ...]]]:
    """What is compared: from a prompt's token ids to new ones."""
    base = generator.base.model
    assistant.generation_config.num_assistant_tokens = drafts
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def theirs(prompt: Any, **more: Any) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": TOKENS, "do_sample": False, **more}
        made = base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return tuple(made[0, len(prompt) :].tolist())

    return {
        "the base alone": theirs,
        "assisted": lambda prompt: theirs(prompt, assistant_model=assistant),
        "ours": lambda prompt: generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts).tokens,
    }


def compare(found: dict[str, Callable[[Any], tuple[int, ...]]], prompts: list[tuple[int, ...]]) -> None:
    """Tokens a CPU second of each, and how many texts are the base's own."""
    took: dict[str, float] = dict.fromkeys(found, 0.0)
    tokens, same = Counter[str](), Counter[str]()
    for prompt in (prompts[0], *prompts):  # the first time kernels are chosen
        texts = {}
        for name, write in found.items():
            start = time.process_time()
            texts[name] = write(prompt)
            took[name] += time.process_time() - start
            tokens[name] += len(texts[name])
            same[name] += texts[name] == texts["the base alone"]
    for name in found:
        print(
            f"{name}: {tokens[name] / took[name]:.0f} tokens a CPU second, {same[name]}/{len(prompts) + 1} texts same"
        )
    print(f"ours over assisted: {tokens['ours'] / took['ours'] / (tokens['assisted'] / took['assisted']):.2f}")


def main() -> None:
    """Load a pair, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="*", type=Path, metavar="DIR", help="a drafter's and its base's")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if not options.pair:
            mtp_extract.extract(sample_bundle(), Path(folder) / "drafter", format="transformers", dtype="f32")
        directory, home = options.pair or (Path(folder) / "drafter", sample_base())
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(home)
        assistant: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        generator = SpeculativeGenerator(base, load_drafter(directory, dtype=base.dtype), tokenizer)
        prompts = shipped_prompts() if options.pair else read_prompts(sample_prompts())
        encoded = encode_prompts(spread(prompts, options.prompts), generator.codec, chat_template=False)
        compare(ways(generator, assistant, options.drafts), encoded)


if __name__ == "__main__":
    main()
