"""The trainable parameters of a drafter, and the weights that are written from them.

Every trained weight has a *latent*: an F32 parameter that begins at the stored weight. Norms and factors move in units
of their own size, so that one learning rate suits a weight of 0.05 and one of 50. The latent of a quantized matrix is a
float matrix that is rounded to the stored scales and codes on each use; its gradient passes the rounding unchanged
(straight-through). Scales and zero points are never changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import HEAD_ROLES, MATRIX, NORM, SCALAR, Role
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import Weight, split_rows, wrap_array, wrap_codes


@dataclass(frozen=True)
class TrainingMode:
    matrices: str  # "kept" as they are, trained on their stored "grid", or "free", as floats
    learning_rate: float  # of the matrices, at a width of 64; inversely proportional to it
    norms_learning_rate: float  # of norms and factors, in units of their size


MODES: Mapping[str, TrainingMode] = MappingProxyType(
    {
        "norms": TrainingMode("kept", 0.0, 3e-3),
        "qat": TrainingMode("grid", 1.5e-3, 3e-3),
        "float": TrainingMode("free", 1e-3, 1e-3),
        # An untrained head has nothing to lose, so it takes larger steps.
        "eagle3": TrainingMode("free", 3e-3, 3e-3),
    }
)
"""Training modes by name. All of them train norms and factors."""

_MEASURED_WIDTH = 64  # of the drafter for which the learning rates were measured


class Latents(nn.Module):
    """The trained weights of a checkpoint. ``values`` holds a latent by the name of the first role that has the weight.

    Roles in ``idle`` are not trained, as no loss depends on them.
    """

    def __init__(
        self, checkpoint: Checkpoint, mode: TrainingMode, device: torch.device | str = "cpu", idle: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.mode = mode
        self.values = nn.ParameterDict()
        self._roles: dict[str, list[Role]] = {}  # by latent: the roles that share the weight
        self._starts: dict[str, tuple[Tensor, float]] = {}  # of a norm or factor: stored weight, root mean square
        self._grids: dict[str, Grid] = {}  # of a matrix that is trained on its grid
        origins: dict[object, str] = {}
        for role in _list_trained_roles(checkpoint, mode, idle):
            weight = checkpoint.tensors[role.name]
            # Roles that are one stored constant have one latent.
            key = origins.setdefault(weight.origin or role.name, role.name.replace(".", "/"))
            self._roles.setdefault(key, []).append(role)
            if key not in self.values:
                self._add_latent(key, role, weight, device)

    def _add_latent(self, key: str, role: Role, weight: Weight, device: torch.device | str) -> None:
        # A copy has torch's alignment, on which the last bit of a product depends.
        latent = torch.from_numpy(weight.array()).to(device, copy=True)
        if role.kind != MATRIX:
            self._starts[key] = latent, float(latent.square().mean().sqrt()) or 1.0
            latent = torch.zeros_like(latent)
        elif self.mode.matrices == "grid":
            self._grids[key] = Grid(weight, device)
        self.values[key] = nn.Parameter(latent)

    def list_param_groups(self, learning_rate: float | None = None) -> list[dict[str, object]]:
        """List the optimizer's parameter groups: matrices, then norms and factors, each with its learning rate.

        ``learning_rate`` replaces the rates of the mode.
        """
        matrices = [value for key, value in self.values.items() if key not in self._starts]
        others = [value for key, value in self.values.items() if key in self._starts]
        rate = learning_rate or self.mode.learning_rate * _MEASURED_WIDTH / self.checkpoint.config.hidden_size
        norms = learning_rate or self.mode.norms_learning_rate
        return [{"params": params, "lr": lr} for params, lr in ((matrices, rate), (others, norms)) if params]

    @property
    def parameter_count(self) -> int:
        return sum(value.numel() for value in self.values.values())

    def forward(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the trained weights in ``dtype`` by path in the reference drafter; gradients reach the latents."""
        weights = {key: self._compute_weight(key, latent).to(dtype) for key, latent in self.values.items()}
        return {role.path: weight for key, weight in weights.items() for role in self._roles[key]}

    def _compute_weight(self, key: str, latent: Tensor) -> Tensor:
        if key in self._starts:
            start, size = self._starts[key]
            return start + latent * size
        if key in self._grids:
            return _StraightThrough.apply(latent, self._grids[key])  # type: ignore[no-untyped-call,no-any-return]  # untyped in torch
        return latent

    @torch.no_grad()
    def copy_results(self) -> dict[str, Tensor]:
        """Return by latent name a copy on the CPU: int8 or uint8 codes where it trains on a grid, else the latent."""
        floats = {
            key: latent.detach().to("cpu", copy=True) for key, latent in self.values.items() if key not in self._grids
        }
        codes = {key: grid.quantize(self.values[key]).to("cpu", grid.dtype) for key, grid in self._grids.items()}
        return floats | codes

    @torch.no_grad()
    def build_checkpoint(self, results: Mapping[str, Tensor]) -> Checkpoint:
        """Return the checkpoint with ``results`` (of :meth:`copy_results`) as weights; unchanged floats keep theirs."""
        tensors: dict[str, Weight] = dict(self.checkpoint.tensors)
        for key, result in results.items():
            old = tensors[self._roles[key][0].name]
            if grid := self._grids.get(key):
                new: Weight = wrap_codes(result.numpy(), grid.scheme, grid.steps, old.origin)
            else:
                numbers = self._compute_weight(key, result.to(self.values[key].device)).cpu().numpy()
                new = old if np.array_equal(numbers, old.array()) else wrap_array(numbers)
            tensors.update({role.name: new for role in self._roles[key]})
        return replace(self.checkpoint, tensors=MappingProxyType(tensors))


def _list_trained_roles(checkpoint: Checkpoint, mode: TrainingMode, idle: Sequence[str]) -> Iterator[Role]:
    kinds = (NORM, SCALAR) if mode.matrices == "kept" else (NORM, SCALAR, MATRIX)
    # The choice of clusters in an ordered head has no gradient. The input norm of an EAGLE-3 head is followed by the
    # matrix fc, which can learn the same factors.
    untrained = ("input_norm", *HEAD_ROLES, *idle)
    for role in list_shapes(checkpoint.config):
        if role.kind in kinds and role.name not in untrained:
            yield role


class Grid:
    """Rounds floats to the scales and codes of a ``stored`` matrix, as NumPy's ``Steps`` of a weight, but in torch."""

    def __init__(self, stored: Weight, device: torch.device | str) -> None:
        scheme = stored.scheme
        assert scheme is not None, "the pair was asked for the codes of every matrix"
        steps = stored.steps
        low = scheme.lowest
        # A symmetric quantizer does not use the lowest code, and engines may rely on that.
        symmetric = scheme.signed and not steps.zero_point.any()
        unused = symmetric and all(int(stored.codes(*rows).min()) > low for rows in split_rows(stored))
        self.low = low + unused
        self.high = low + (1 << scheme.bits) - 1
        self.dtype = torch.int8 if scheme.signed else torch.uint8  # of stored codes
        self.scheme = scheme
        self.steps = steps
        self.size = torch.from_numpy(np.array(steps.size)).to(device)[..., None]  # F32 [rows, blocks, 1]
        self.zero_point = torch.from_numpy(steps.zero_point.astype(np.float32)).to(device)[..., None]

    def quantize(self, values: Tensor) -> Tensor:
        """Return the nearest code of each value, F32 in the shape of ``values``."""
        blocks = values.view(len(values), -1, self.steps.block)
        # code = clamp(round(value · factor / step) + zero point); where the step is 0, every code means 0.
        # In place, as a copy of the LM head's matrix takes 268 MB.
        codes = (blocks * self.steps.factor).div_(torch.where(self.size == 0, 1, self.size))
        return codes.round_().add_(self.zero_point).clamp_(self.low, self.high).view(values.shape)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return (code − zero point) · step / factor, bit for bit as the NumPy ``Steps`` compute it."""
        blocks = codes.view(len(codes), -1, self.steps.block)
        floats = (blocks - self.zero_point).mul_(self.size).view(codes.shape)
        return floats if self.steps.factor == 1 else (floats.double() / self.steps.factor).float()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, grid: Grid) -> Tensor:
        return grid.dequantize(grid.quantize(value))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
