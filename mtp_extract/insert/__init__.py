"""Putting a checkpoint's weights back where a bundle keeps them."""
