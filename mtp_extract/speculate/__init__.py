"""Speculative decoding with an MTP drafter: generation, teacher-forced agreement, and the arithmetic of both.

>>> generator = SpeculativeGenerator(base, drafter, tokenizer)                 # doctest: +SKIP
>>> generator.generate("def main():", drafts=4).text                           # doctest: +SKIP
>>> generator.generate([{"role": "user", "content": "Hello"}])                 # doctest: +SKIP
>>> generator.generate("def main():", drafts=AdaptiveDrafts(), temperature=1)  # doctest: +SKIP
>>> generator.generate("def main():", drafts=Tree.parse("4x2x1")).text         # doctest: +SKIP
>>> for r in generator.rounds(tokens): ...                                     # doctest: +SKIP
>>> teacher_forced(generator.base, drafter, [Text(tokens, prompt_length)], 4)  # doctest: +SKIP

How acceptance is counted. A round drafts K tokens (fewer when fewer could still be emitted, as in
transformers); ``acceptance`` is accepted over drafted, the "success rate" LiteRT-LM prints, where every
round counts K. The first token comes from the prompt's forward and belongs to no round. A draft after a
stop token is drafted, not accepted.
"""
