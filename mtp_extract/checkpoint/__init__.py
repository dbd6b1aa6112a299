"""Checkpoints: what they are, how formats write and read them, how they are proven, recorded and checked."""
