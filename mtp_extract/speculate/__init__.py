"""Speculative decoding with a drafter: generation, teacher-forced agreement, and the arithmetic of both."""
