"""What a proof shows, in words: the same in every command and on the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.errors import escape


def in_words(proof: Mapping[str, Any]) -> list[str]:
    """What the ``proof`` of a record says, in sentences: what was held, and what is not the checkpoint's."""
    below, tables, rows = max(proof["differences_below"].values()), proof["position_tables"], proof["mask_rows"]
    alike = f"all {rows['of']} (alike up to a shift; {rows['tried']} tried)"
    tried = f"all {rows['of']}" if rows["tried"] == rows["of"] else alike
    said = [
        f"RoPE at all {tables['positions']} positions, masks at {tried} rows, no operator that chooses by an "
        f"activation; on random inputs at {len(proof['positions'])} positions graph and checkpoint agree to {below:g} "
        "of their range"
    ]
    coarse: dict[tuple[str, float, int], list[str]] = {}
    for table in proof["coarse_tables"]:
        key = table["held_in"], table["outputs_move_by"], table["outputs_at"]
        coarse.setdefault(key, []).append(str(table["layer"]))
    said += [
        f"but for the file's own RoPE tables of layers {', '.join(layers)}, held in {escape(kind)}, which move the "
        f"outputs by up to {moved:g} of their range (at position {position}); written is the exact theta"
        for (kind, moved, position), layers in coarse.items()
    ]
    if held := proof["activations_held_in"]:
        kinds = ", ".join(f"{escape(count)} in {escape(kind)}" for kind, count in held.items())
        said.append(
            f"in real numbers: the file's own kernels round activations ({kinds}), a checkpoint of floats does not"
        )
    return said
