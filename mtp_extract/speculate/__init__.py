"""Speculative decoding with an MTP drafter: generation, teacher-forced agreement, and the arithmetic of both.

>>> generator = SpeculativeGenerator(base, drafter, tokenizer)                 # doctest: +SKIP
>>> generator.generate("def main():", drafts=4).text                           # doctest: +SKIP
>>> generator.generate([{"role": "user", "content": "Hello"}], stop="\\n\\n")    # doctest: +SKIP
>>> generator.generate("def main():", drafts=AdaptiveDrafts(), temperature=1)  # doctest: +SKIP
>>> generator.generate("def main():", drafts=Tree.parse("4x2x1")).text         # doctest: +SKIP
>>> for chunk in generator.stream("def main():"): ...                          # doctest: +SKIP
>>> generator.generate_batch(["import", "class"], Options(max_new_tokens=64))  # doctest: +SKIP
>>> teacher_forced(generator.base, drafter, [Text(tokens, prompt_length)], 4)  # doctest: +SKIP

How acceptance is counted. A round drafts K tokens (fewer when fewer could still be emitted, as in
transformers); ``acceptance`` is accepted over drafted, the "success rate" LiteRT-LM prints, where every
round counts K. The first token comes from the prompt's forward and belongs to no round. A draft after a
stop token is drafted, not accepted.

Names are imported when they are first used: the arithmetic needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_extract.speculate.adaptive import AdaptiveDrafts
    from mtp_extract.speculate.arithmetic import (
        Proportion,
        best_draft_length,
        expected_tokens,
        speedup,
    )
    from mtp_extract.speculate.batches import groups
    from mtp_extract.speculate.codec import Codec, Encoded, Prompt
    from mtp_extract.speculate.generate import Options, SpeculativeGenerator
    from mtp_extract.speculate.intervals import (
        Interval,
        difference_interval,
        ratio_interval,
        share_interval,
    )
    from mtp_extract.speculate.result import (
        Chunk,
        Generation,
        Round,
        conditional_by_step,
        unconditional_by_step,
    )
    from mtp_extract.speculate.sampling import Sampling, Verdict, draw, verify_greedy, verify_sampled, verify_tree
    from mtp_extract.speculate.target import Base, check_pair
    from mtp_extract.speculate.teacher import Agreement, Ranks, Text, ranks_of_text, teacher_forced
    from mtp_extract.speculate.texts import repeats
    from mtp_extract.speculate.trees import AutoTree, Tree, best_tree, expected_length, parse_tree, rank_shares

__all__ = [
    "AdaptiveDrafts",
    "Agreement",
    "AutoTree",
    "Base",
    "Chunk",
    "Codec",
    "Encoded",
    "Generation",
    "Interval",
    "Options",
    "Prompt",
    "Proportion",
    "Ranks",
    "Round",
    "Sampling",
    "SpeculativeGenerator",
    "Text",
    "Tree",
    "Verdict",
    "best_draft_length",
    "best_tree",
    "check_pair",
    "conditional_by_step",
    "difference_interval",
    "draw",
    "expected_length",
    "expected_tokens",
    "groups",
    "parse_tree",
    "rank_shares",
    "ranks_of_text",
    "ratio_interval",
    "repeats",
    "share_interval",
    "speedup",
    "teacher_forced",
    "unconditional_by_step",
    "verify_greedy",
    "verify_sampled",
    "verify_tree",
]

_HOMES = {
    "AdaptiveDrafts": "adaptive",
    "Agreement": "teacher",
    "AutoTree": "trees",
    "Base": "target",
    "Chunk": "result",
    "Codec": "codec",
    "Encoded": "codec",
    "Generation": "result",
    "Interval": "intervals",
    "Options": "generate",
    "Prompt": "codec",
    "Proportion": "arithmetic",
    "Ranks": "teacher",
    "Round": "result",
    "Sampling": "sampling",
    "SpeculativeGenerator": "generate",
    "Text": "teacher",
    "Tree": "trees",
    "Verdict": "sampling",
    "best_draft_length": "arithmetic",
    "best_tree": "trees",
    "check_pair": "target",
    "conditional_by_step": "result",
    "difference_interval": "intervals",
    "draw": "sampling",
    "expected_length": "trees",
    "expected_tokens": "arithmetic",
    "groups": "batches",
    "parse_tree": "trees",
    "rank_shares": "trees",
    "ranks_of_text": "teacher",
    "ratio_interval": "intervals",
    "repeats": "texts",
    "share_interval": "intervals",
    "speedup": "arithmetic",
    "teacher_forced": "teacher",
    "unconditional_by_step": "result",
    "verify_greedy": "sampling",
    "verify_sampled": "sampling",
    "verify_tree": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
