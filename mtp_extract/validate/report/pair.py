"""``pair.json``: base and drafter as the parts of one model, by the names of the seed's plan for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.report.page import plain_json
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import DraftLengthResult
from mtp_extract.validate.acceptance.pair import Held, PairFacts, Side
from mtp_extract.validate.result import BaseFacts, Validation

_VERSION = 1
_EXPORT = "target_hidden_stream"
_READS = (
    "an MTP drafter computes no keys and values: it reads the base's, and holds them in F32 for a round where they "
    "are not"
)
_UNTIMED = "no round with drafts was timed"
_ALTERNATIVES = "drafts of a tree are alternatives: not all of them can stand"


def pair_as_json(found: Validation) -> dict[str, Any] | None:
    """``pair.json``: only JSON's own types; None without a base, or where no text was long enough to draft from."""
    pairs = [(drafter, drafter.pair) for drafter in found.drafters if drafter.pair is not None]
    if found.base is None or not pairs:
        return None
    first, *others = (_pair(drafter, facts) for drafter, facts in pairs)
    plain: dict[str, Any] = plain_json(
        {
            "version": _VERSION,
            "tool": {"name": "mtp-extract", "version": __version__},
            "model": "gemma4_speculative_pair",
            "target": _target(found.base, pairs[0][1]),
            **first,
            "beside": others,
        }
    )
    return plain


def _target(base: BaseFacts, facts: PairFacts) -> dict[str, Any]:
    return {
        "name": base.name,
        "devices": base.devices,
        "hidden_export": _EXPORT,
        "hidden_size": facts.needs.width,
        "vocab_size": facts.needs.vocab_size,
        "layers": facts.layers,
        **_side(facts.target),
    }


def _side(side: Side) -> dict[str, Any]:
    return {"dtype": side.dtype, "parameters": side.parameters, "bytes": side.nbytes}


def _pair(drafter: DrafterFigures, facts: PairFacts) -> dict[str, Any]:
    needs = facts.needs
    return {
        "draft": {
            "name": drafter.facts.name,
            "assistant_role": "eagle3_head" if needs.own_cache else "mtp_drafter",
            "format": drafter.facts.format,
            "backbone_hidden_size": needs.width,
            "hidden_size": facts.width,
            **_side(facts.draft),
            # A layer's scalar is a parameter, though PyTorch has it for a buffer.
            "parameters": drafter.facts.reads.parameters.stored,
        },
        "bridge": {
            "source": _EXPORT,
            "dest": "draft.backbone_stream",
            "shape": ["T", (needs.final_hidden + len(needs.layers)) * needs.width],
            "layers": needs.layers or None,
            "embedding": needs.embedding,
            "shared_kv": {kind: {"heads": h, "head_dim": d} for kind, (h, d) in needs.shared_kv.items()},
        },
        "verify": {
            "rule": "greedy",
            "drafts": facts.drafts,
            "T": facts.fed,
            "positions": facts.positions,
            "inputs": ["draft_candidate_tokens", "target_logits"],
            "outputs": ["accepted_tokens", "rejected_token"],
        },
        "buffers": {
            name: _buffer(held, shared=name == "draft_kv_cache" and not needs.own_cache)
            for name, held in facts.buffers.items()
        },
        "metrics": {result.name: _metrics(result) for result in drafter.generation.lengths},
    }


def _buffer(held: Sequence[Held], *, shared: bool) -> dict[str, Any]:
    return {
        "bytes": sum(tensors.nbytes for tensors in held),
        "shared_with": "target_kv_cache" if shared else None,
        "why": _READS if shared else None,
        "tensors": [
            {
                "what": tensors.what,
                "shape": tensors.shape,
                "axes": tensors.axes,
                "dtype": tensors.dtype,
                "copies": tensors.copies,
                "bytes": tensors.nbytes,
            }
            for tensors in held
        ],
    }


def _metrics(found: DraftLengthResult) -> dict[str, Any]:
    chain = found.tree is None
    measured: Mapping[str, Any] = plain_json(
        {
            "backbone_only_tok_per_sec": found.base_tokens_per_s,
            "speculative_tok_per_sec": found.speculative_tokens_per_s,
            "draft_tokens_per_batch": found.drafts,
            "accepted_tokens/drafted_tokens": found.acceptance if chain else None,
            "target_verify_ms": found.verify_ms,
            "assistant_draft_ms": found.draft_ms,
        }
    )
    why = {name: _UNTIMED for name, value in measured.items() if value is None}
    if not chain:
        why["accepted_tokens/drafted_tokens"] = _ALTERNATIVES
    return {**measured, "why": why}
