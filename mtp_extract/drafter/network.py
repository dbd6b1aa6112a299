"""Parts that all architectures share: RMSNorm, rotation, strict loading of weights, and the draft step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.drafter.protocol import Drafter

_Shape = TypeVar("_Shape")
_Network = TypeVar("_Network", bound=nn.Module)
_Drafter = TypeVar("_Drafter", bound="DrafterNetwork")


def build_network(network: Callable[[_Shape], _Network], shape: _Shape, state: Mapping[str, Tensor]) -> _Network:
    """Build ``network`` around the tensors of ``state``, without copies, in evaluation mode; all must match."""
    with torch.device("meta"):
        module = network(shape)
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval().requires_grad_(False)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in F32. The weight is the factor itself, not the factor minus 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.pow(wide.square().mean(-1, keepdim=True) + self.eps, -0.5)
        return (normed * self.weight.float()).type_as(x)


class Angles(NamedTuple):
    """Cosines and sines of a rotation, F32 [batch, queries, 1, head_dim]; its halves have the same angles."""

    cosine: Tensor
    sine: Tensor


def compute_angles(position_ids: Tensor, width: int, rope: RopeConfig) -> Angles:
    """Compute the rotation of heads of ``width`` at ``position_ids`` [batch, queries].

    Dimensions i and i + head_dim/2 are rotated by position · theta^(-2i/head_dim); in a partial rotation the
    frequencies of the remaining pairs are zero.
    """
    rotated = int(rope.partial_rotary_factor * width // 2)
    index = torch.arange(width // 2, device=position_ids.device)
    # A reciprocal, as in transformers: at position 100 000 the last bit of a frequency is 1/100 of a radian.
    frequency = 1.0 / rope.theta ** (2 * index / width) / rope.factor * (index < rotated)
    angle = (position_ids[..., None].float() * frequency)[:, :, None, :]  # [B, L, 1, D/2]
    sine = angle.sin()
    return Angles(torch.cat((angle.cos(),) * 2, dim=-1), torch.cat((-sine, sine), dim=-1))


def rotate(x: Tensor, by: Angles) -> Tensor:
    """Rotate ``x`` [batch, queries, heads, head_dim]."""
    wide = x.float()
    return (wide * by.cosine + wide.roll(wide.shape[-1] // 2, -1) * by.sine).type_as(x)


class DrafterNetwork(nn.Module, Drafter):
    """A network with the :class:`~mtp_extract.drafter.protocol.Drafter` protocol; ``config`` is its shape."""

    config: Any
    lm_head: nn.Linear

    @abstractmethod
    def advance(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """Compute one step: the state after the final norm, [batch, queries, width], and the state of the next step."""

    @abstractmethod
    def logits(self, h: Tensor) -> Tensor:
        """Compute the logits […, vocabulary] of ``h`` […, width] after the final norm; −∞ for undraftable tokens."""

    @property
    def targets(self) -> Tensor | slice:
        """The base's token of each row of the head, int64 [rows]; the full slice if rows are tokens."""
        return slice(None)

    def find_rows(self, tokens: Tensor) -> Tensor:
        """Return the head's row for each of the base's ``tokens``, int64 in their shape; −1 for undraftable tokens."""
        return tokens

    def step(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        h, following = self.advance(state, token)
        return self.logits(h), following

    def with_tensors(self: _Drafter, changes: Mapping[str, Tensor]) -> _Drafter:
        """Return a drafter with the tensors in ``changes`` replaced, by state_dict key; it shares the others."""
        return build_network(type(self), self.config, {**self.state_dict(), **changes})

    def with_config(self: _Drafter, config: Any) -> _Drafter:
        """Return a drafter with another config that shares these weights, as controls with another scale need it."""
        return build_network(type(self), config, self.state_dict())
