"""What a round of speculative decoding costs beside the models: waits, operators, and time; and what a tree yields.

    python scripts/bench_rounds.py [DRAFTER_DIR BASE_DIR] [--prompts N]

Without directories it is the sample's pair. CPU time of one thread, a batch of one. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluate.prompts import encode_prompts, shipped_prompts
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.sampling import Sampling
from mtp_extract.speculate.trees import AutoTree, Tree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.dispatched import rounds_on_meta
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import random_base, random_drafter

KINDS: dict[str, int | Tree | AutoTree] = {
    "3": 3,
    "8": 8,
    "2x2x2": Tree.parse("2x2x2"),
    "auto:8": AutoTree(8),
}
TOKENS = 64


def counted() -> None:
    """Waits and operators of a round, of random drafters of two layers and one beside a base of five."""
    for (name, drafts), sampling in itertools.product(KINDS.items(), (Sampling(), Sampling(temperature=1.0))):
        for kind, drafter in (("MTP", random_drafter), ("EAGLE-3", lambda _: random_head(head_config()))):
            base = random_base()
            found = rounds_on_meta(base, drafter(base), Options(60, drafts, sampling, stop_token_ids=[]))[1]
            print(
                f"{kind}, drafts {name}, temperature {sampling.temperature:g}: {found.waits} wait, {found.copies} "
                f"copies, {found.operators.total()} operators a round"
            )


class Watch:
    """Time spent inside some callables."""

    def __init__(self) -> None:
        self.inside = 0.0

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside += time.process_time() - start

        return timed


def timed(generator: SpeculativeGenerator, prompts: list[Any]) -> None:
    """CPU time of a greedy round, of it outside the two networks, and the mean accepted length."""
    watch = Watch()
    drafter, base = generator.drafter, generator.base.model
    for owner, name in ((drafter, "network"), (drafter, "logits"), (base.model, "forward"), (base.lm_head, "forward")):
        setattr(owner, name, watch.over(getattr(owner, name)))
    for name, drafts in KINDS.items():
        results = []
        watch.inside = 0.0
        start = time.process_time()
        for prompt in prompts:
            results += generator.generate_batch([prompt], Options(TOKENS, drafts))
        took = time.process_time() - start
        rounds = sum(len(result.rounds) for result in results)
        length = fmean(r.emitted for result in results for r in result.rounds if r.drafted)
        print(
            f"drafts {name}: {1e3 * took / rounds:.2f} ms a round, {1e3 * (took - watch.inside) / rounds:.2f} ms of it "
            f"outside the networks; {length:.3f} tokens a round"
        )


def main() -> None:
    """Count, and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="*", type=Path, metavar="DIR", help="a drafter's and its base's")
    parser.add_argument("--prompts", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted()
    with tempfile.TemporaryDirectory() as folder:
        if not options.pair:
            mtp_extract.extract(sample_bundle(), Path(folder) / "drafter", format="transformers", dtype="f32")
        directory, home = options.pair or (Path(folder) / "drafter", sample_base())
        base: Any = transformers.Gemma4ForConditionalGeneration.from_pretrained(home)
        base.eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        generator = SpeculativeGenerator(base, load_drafter(directory), tokenizer)
        encoded = encode_prompts(shipped_prompts(), generator.codec, chat_template=False)
        timed(generator, list(encoded[:: max(1, len(encoded) // options.prompts)]))


if __name__ == "__main__":
    main()
