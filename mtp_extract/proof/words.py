"""What a proof shows, in words: the same in every command and on the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.errors import escape


def in_words(proof: Mapping[str, Any]) -> list[str]:
    """What the ``proof`` of a record says, in sentences: what was held, and what is not the checkpoint's."""
    rows = proof["mask_rows"]
    masks = f"all {rows['of']} rows" + ("" if rows["computed"] == rows["of"] else ", which are alike up to a shift")
    said = [
        f"every operator was read as a drafter's; RoPE holds at all {proof['positions']} positions, masks in {masks}, "
        "and every number of every tensor"
    ]
    said += [
        f"but for the file's own RoPE table of layer {table['layer']}, stored in {escape(table['held_in'])}; the exact "
        "theta is written"
        for table in proof["coarse_tables"]
    ]
    if held := proof["activations_held_in"]:
        kinds = ", ".join(f"{escape(count)} in {escape(kind)}" for kind, count in held.items())
        said.append(
            f"in real numbers: the file's own kernels round activations ({kinds}), a checkpoint of floats does not"
        )
    return said
