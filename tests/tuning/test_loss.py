"""The chunked loss is the plain one: value and gradient, whatever the chunks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtp_extract.tuning import loss
from mtp_extract.tuning.loss import OBJECTIVES, TrainingRows, compute_gradient

ROWS, POSITIONS, WIDTH, VOCABULARY, WEIGHT = 37, 11, 8, 50, 0.3


def make_values(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    base = 3 * torch.randn(POSITIONS, VOCABULARY, generator=random)
    return {
        "states": torch.randn(ROWS, WIDTH, generator=random),
        "head": 4 * torch.randn(VOCABULARY, WIDTH, generator=random),
        "base": base,
        "targets": torch.randint(POSITIONS, (ROWS,), generator=random),
        "ce_counts": torch.rand(ROWS, generator=random) < 0.6,
    }


def compute_plain_loss(name: str, values: dict[str, Any], cap: float | None, temperature: float) -> Tensor:
    """Compute the loss by its definition, with all logits at once and autograd, in F64."""
    logits = values["states"] @ values["head"].T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_q = torch.log_softmax(logits / temperature, dim=-1)
    log_p = torch.log_softmax(values["base"].double() / temperature, dim=-1)[values["targets"]]
    chosen = (
        functional.nll_loss(log_q, values["base"].argmax(-1)[values["targets"]], reduction="none") * values["ce_counts"]
    )
    rejected = 1 - torch.minimum(log_q.exp(), log_p.exp()).sum(-1)
    each = {
        "ce": chosen,
        "kl": functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        "tv": rejected,
        "mixed": 0.6 * chosen + 0.4 * rejected,
    }[name]
    return WEIGHT * each.sum()


def compute_in_chunks(
    name: str, values: dict[str, Any], cap: float | None, temperature: float, at_once: int
) -> tuple[Any, ...]:
    requested: list[Tensor] = []

    def logits(positions: Tensor) -> Tensor:
        requested.append(positions)
        return values["base"][positions]

    aims = (values["targets"], values["base"].argmax(-1), logits, WEIGHT, values["ce_counts"])
    rows = TrainingRows(*aims, OBJECTIVES[name], cap, temperature)
    with patch.object(loss, "LOGITS_AT_ONCE", at_once):
        result = compute_gradient(rows, values["states"], values["head"])
    if name != "ce" and at_once > ROWS * VOCABULARY:
        positions = torch.cat(requested)
        assert positions.tolist() == values["targets"].unique().tolist(), "the base's logits, once for every position"
    return result


@pytest.mark.parametrize("at_once", [1, 7 * VOCABULARY, 1 << 20])
@pytest.mark.parametrize(("cap", "temperature"), [(None, 1.0), (5.0, 1.0), (5.0, 0.7)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient(name: str, cap: float | None, temperature: float, at_once: int) -> None:
    values = make_values()
    exact = {key: value.double() if value.is_floating_point() else value for key, value in values.items()}
    for inputs in (values, exact):
        inputs["states"].requires_grad_()
        inputs["head"].requires_grad_()
    expected = compute_plain_loss(name, exact, cap, temperature)
    expected.backward()
    value, _, gradients = compute_in_chunks(name, values, cap, temperature, at_once)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, gradient in zip(("states", "head"), gradients, strict=True):
        assert (gradient - exact[key].grad).abs().max() < 1e-5 * exact[key].grad.abs().max(), key


def test_agreement() -> None:
    """A head that is not trained has no gradient."""
    values = make_values(1)
    logits = values["states"] @ values["head"].T
    choices = values["base"].argmax(-1)[values["targets"]]
    for name in ("ce", "mixed"):
        _, hits, gradients = compute_in_chunks(name, values, None, 1.0, 200)
        assert len(gradients) == 1
        assert torch.equal(hits.bool(), logits.argmax(-1) == choices) and 0 < hits.mean() < 1
    p, q = values["base"].softmax(-1)[values["targets"]], logits.softmax(-1)
    for name in ("kl", "tv"):
        torch.testing.assert_close(compute_in_chunks(name, values, None, 1.0, 200)[1], torch.minimum(p, q).sum(-1))


def test_only_a_chunk_of_logits_exists() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = [item for item in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(item, Tensor)]
            largest = max([largest, *(tensor.numel() for tensor in tensors)])
            return out

    rows, base = 900, torch.randn(1, VOCABULARY)
    states, head = (torch.randn(count, WIDTH, requires_grad=True) for count in (rows, VOCABULARY))
    aimed = torch.arange(rows), torch.zeros(rows, dtype=torch.long), lambda positions: base[0 * positions]
    with Watching(), patch.object(loss, "LOGITS_AT_ONCE", 20 * VOCABULARY):
        for objective in OBJECTIVES.values():
            counted = TrainingRows(*aimed, 1.0, torch.ones(rows, dtype=torch.bool), objective, 30.0)
            compute_gradient(counted, states, head)
    assert 20 * VOCABULARY <= largest <= rows * WIDTH
