"""Speculative decoding with a drafter: generation, teacher-forced agreement, and the arithmetic of both.

>>> generator = SpeculativeGenerator(base, drafter, tokenizer)                 # doctest: +SKIP
>>> generator.generate("def main():", drafts=4).text                           # doctest: +SKIP
>>> teacher_forced(generator.base, drafter, [Text(tokens, prompt_length)], 4)  # doctest: +SKIP

How acceptance is counted. A round drafts K tokens (fewer when fewer could still be emitted, as in
transformers); ``acceptance`` is accepted over drafted, the "success rate" LiteRT-LM prints, where every
round counts K. The first token comes from the prompt's forward and belongs to no round. A draft after a
stop token is drafted, not accepted.
"""
