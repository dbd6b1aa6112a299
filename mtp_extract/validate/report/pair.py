"""``pair.json``: base and drafter as the parts of one model, by the names of the seed's plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.io.typed import fill
from mtp_extract.report.page import plain_json
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import DraftLengthResult
from mtp_extract.validate.acceptance.pair import Held, PairFacts
from mtp_extract.validate.report import fields
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
        fill(
            fields.Pair,
            version=_VERSION,
            tool={"name": "mtp-extract", "version": __version__},
            model="gemma4_speculative_pair",
            target=_target(found.base, pairs[0][1]),
            **first,
            beside=others,
        )
    )
    return plain


def _target(base: BaseFacts, facts: PairFacts) -> dict[str, Any]:
    return fill(
        fields.Target,
        facts.target,
        name=base.name,
        devices=base.devices,
        hidden_export=_EXPORT,
        hidden_size=facts.needs.width,
        vocab_size=facts.needs.vocab_size,
        layers=facts.layers,
    )


def _pair(drafter: DrafterFigures, facts: PairFacts) -> dict[str, Any]:
    needs = facts.needs
    return fill(
        fields.PairBeside,
        draft=fill(
            fields.Draft,
            facts.draft,
            name=drafter.facts.name,
            assistant_role="eagle3_head" if needs.own_cache else "mtp_drafter",
            format=drafter.facts.format,
            backbone_hidden_size=needs.width,
            hidden_size=facts.width,
            # A layer's scalar is a parameter, though PyTorch has it for a buffer.
            parameters=drafter.facts.reads.parameters.stored,
        ),
        bridge=fill(
            fields.Bridge,
            needs,
            source=_EXPORT,
            dest="draft.backbone_stream",
            shape=("T", (needs.final_hidden + len(needs.layers)) * needs.width),
            layers=needs.layers or None,
            shared_kv={kind: {"heads": heads, "head_dim": dim} for kind, (heads, dim) in needs.shared_kv.items()},
        ),
        verify=fill(
            fields.Verify,
            facts,
            rule="greedy",
            inputs=("draft_candidate_tokens", "target_logits"),
            outputs=("accepted_tokens", "rejected_token"),
        ),
        buffers={
            name: _buffer(held, shared=name == "draft_kv_cache" and not needs.own_cache)
            for name, held in facts.buffers.items()
        },
        metrics={result.name: _metrics(result) for result in drafter.generation.lengths},
    )


def _buffer(held: Sequence[Held], *, shared: bool) -> dict[str, Any]:
    return fill(
        fields.Buffer,
        nbytes=sum(tensors.nbytes for tensors in held),
        shared_with="target_kv_cache" if shared else None,
        why=_READS if shared else None,
        tensors=held,
    )


def _metrics(found: DraftLengthResult) -> dict[str, Any]:
    chain = found.tree is None
    measured = plain_json(fill(fields.Metrics, found, acceptance=found.acceptance if chain else None, why={}))
    why = {name: _UNTIMED for name, value in measured.items() if value is None}
    if not chain:
        why["accepted_tokens/drafted_tokens"] = _ALTERNATIVES
    return {**measured, "why": why}
