"""The reference drafter, computing what the interpreter computes, rounding included.

Every matrix of the graph is one of three kinds, and the graph says which:

======== ==================================== =====================================================
kind     in the graph                         arithmetic
======== ==================================== =====================================================
float    float weights, or integers that a    as in the reference
         DEQUANTIZE turns back before the op
dynamic  float activations, integer weights   each row of activations is quantized to INT8 by its
                                              own range, multiplied in integers, scaled back
static   INT8 or INT16 activations            input and output are rounded to recorded scales
======== ==================================== =====================================================

How a row is quantized in the dynamic kind depends on the kernels; both were found by trying, and reproduce the
interpreter (ai-edge-litert 2.3.0) to 3e-7 of the logits' range:

- XNNPACK (the default): asymmetric. The row's range, widened to include 0, is spread over the codes -128 … 127.
- the interpreter's own kernels: symmetric, scale max|x| / 127, codes -127 … 127.

Rounding is to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mtp_extract.bundle import Shard
from mtp_extract.checkpoint.rounding import how_rounded
from mtp_extract.checkpoint.weight import of_array
from mtp_extract.drafter.mtp import Layer, MtpDrafter, View, turn
from mtp_extract.errors import PairError, UnsupportedError
from mtp_extract.graph.roles import Activation, FoundRole
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.validate.parity.interface import codes_of
from mtp_extract.validate.parity.oracle import Kernels, Reading, attention_products, readings

_BITS = {"int8": 8, "int16": 16}
# How near a value must lie to the interpreter's rounding, in steps, for that rounding to be followed.
_NEAR = 1 / 200
_FLOATS = (TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16)


@dataclass(frozen=True)
class Scheme:
    kind: str  # "float", "dynamic" or "static"
    input: Activation | None  # recorded scales, for static
    output: Activation | None  # likewise


def schemes(source: Shard) -> dict[str, Scheme]:
    """Role of each matrix → how the graph multiplies by it.

    Raises:
        UnsupportedError: it cannot be told which operator multiplies by an integer matrix.
    """
    read = readings(source)
    return {
        role.role: Scheme(_kind(source, role, read.get(role.role)), role.input, role.output)
        for role in source.walk.roles
        if len(role.shape) == 2
    }


def _kind(source: Shard, role: FoundRole, reading: Reading | None) -> str:
    if role.input is not None:
        return "static"
    if role.tensor is None or role.tensor.type in _FLOATS:
        return "float"
    if reading is None:
        raise UnsupportedError(
            f"{source.model.region.source.name}: {role.role}: its constant is read by several operators, and which is "
            "whose cannot be told; this release does not emulate that."
        )
    return "float" if reading.node.operand(1).tensor.type in _FLOATS else "dynamic"


@dataclass(frozen=True)
class AttentionScheme:
    """Recorded scales of one layer's attention: of the queries, of Q·K, of the probabilities, and of P·V."""

    queries: Activation
    scores: Activation
    probabilities: Activation
    mixed: Activation


def attention_schemes(source: Shard) -> dict[str, AttentionScheme]:
    """Layer → how its attention is rounded; empty where the graph computes it in float.

    Raises:
        UnsupportedError: it rounds in a way that is not emulated.
    """
    found = {}
    for layer, ends in attention_products(source).items():
        codes = [codes_of(value.tensor) for value in ends]
        known = [Activation(np.dtype(c.dtype).name, c.scale, c.zero_point) for c in codes if c is not None]
        if len(known) != len(ends):
            raise UnsupportedError(
                f"{source.model.region.source.name}: {layer}: attention multiplies floats into integers; this "
                "release does not emulate that."
            )
        found[layer] = AttentionScheme(*known)
    return found


@dataclass(frozen=True)
class Operand:
    """What the interpreter had at one matrix, as float32: its operand and its result, None where not readable."""

    input: Tensor | None
    output: Tensor | None


@dataclass(frozen=True)
class Guide:
    """What the interpreter had in one call: role of a matrix → its ends; layer → the four ends of its attention."""

    matrices: Mapping[str, Operand]
    products: Mapping[str, tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Restored:
    """How the checkpoint's tensors compare with the file's. Roles, in the order of the graph."""

    exact: tuple[str, ...]  # equal
    rounded: tuple[str, ...]  # equal once rounded to BF16 or F16, or with its scales rounded
    different: tuple[str, ...]  # neither


def restore(drafter: MtpDrafter, source: Shard) -> tuple[MtpDrafter, Restored]:
    """A float32 copy of ``drafter`` whose rounded tensors have the file's precision back.

    A tensor that is not the file's, not even rounded, is left as the checkpoint has it: parity then shows what
    difference it makes.

    Raises:
        PairError: the checkpoint has other roles or other shapes than the file's drafter.
    """
    state = {path: tensor.float() for path, tensor in drafter.state_dict().items()}
    paths = {path.removesuffix(".weight"): path for path in state}
    found: dict[str, list[str]] = {"exact": [], "rounded": [], "different": []}
    original = checkpoint_of(source).tensors
    for role in source.walk.roles:
        path = paths.get(role.role)
        if path is None or tuple(state[path].shape) != role.shape:
            have = list(state[path].shape) if path else "nothing of that name"
            raise PairError(
                f"{role.role}: expected {list(role.shape)}, as in {source.model.region.source.name}, found {have} in "
                "the checkpoint; give the file that the checkpoint was extracted from"
            )
        expected = original[role.role]
        ours = state[path].cpu()
        if torch.equal(ours, torch.from_numpy(expected.array())):
            kind = "exact"
        elif how_rounded(expected, of_array(ours.numpy())) is not None:
            kind = "rounded"
            state[path] = torch.from_numpy(expected.array())
        else:
            kind = "different"
        found[kind].append(role.role)
    return drafter.with_tensors(state), Restored(*(tuple(found[kind]) for kind in found))


@dataclass(frozen=True)
class Followed:
    """Rounding taken over from the interpreter: ``codes`` of the ``of`` that were computed."""

    codes: int
    of: int


class Emulation:
    """A copy of a drafter (float32, CPU) that multiplies as the graph does.

    Float additions in another order move a value by its last bit, and where it lies between two codes, that
    decides which one it becomes: a step of 1/255 of a row. A drafter rounds tens of thousands of values a
    call, so a few differ in every call. With :meth:`follow`, a value is rounded to the interpreter's code
    where ours lies within ``1/200`` of a step of rounding so too; everywhere else it is rounded by itself.
    """

    def __init__(
        self,
        drafter: MtpDrafter,
        plan: Mapping[str, Scheme],  # by role
        attention: Mapping[str, AttentionScheme],  # by layer
        kernels: Kernels = Kernels.XNNPACK,
    ) -> None:
        self.drafter = drafter.with_config(drafter.config)
        self._kernels = kernels
        self._guide = Guide({}, {})
        self._counts = [0, 0]
        for role, scheme in plan.items():
            module = self.drafter.get_submodule(role)
            if scheme.kind == "dynamic":
                module.register_forward_pre_hook(partial(self._quantize_rows, role))
            elif scheme.input is not None:
                module.register_forward_pre_hook(partial(self._round_input, role, scheme.input))
                if scheme.output is not None:
                    module.register_forward_hook(partial(self._round_output, role, scheme.output))
        for name, rounding in attention.items():
            layer = self.drafter.get_submodule(name)
            if not isinstance(layer, Layer):
                raise TypeError(f"{name} is not a layer")
            layer.attention = partial(self._attention, name, layer, rounding)  # type: ignore[method-assign]

    def follow(self, guide: Guide) -> None:
        """In the next calls, round as the interpreter did where that decides a tie."""
        self._guide = guide

    @property
    def followed(self) -> Followed:
        """How often that happened so far."""
        return Followed(*self._counts)

    def _quantize_rows(self, role: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        ours = inputs[0]
        rounded = quantize_rows(ours, self._kernels)
        if (known := self._guide.matrices.get(role)) is None or known.input is None:
            return (rounded,)
        interpreted = known.input.reshape(ours.shape)
        span = ours.amax(-1, keepdim=True).clamp(min=0) - ours.amin(-1, keepdim=True).clamp(max=0)
        near = ((interpreted - ours).abs() <= span / 255 * _NEAR).all(-1, keepdim=True)
        settled = torch.where(near, quantize_rows(interpreted, self._kernels), rounded)
        # Taking over a row also takes over its scale, which moves by a last bit; count what moved by a code.
        self._count((settled - rounded).abs() > span / 255 / 2)
        return (settled,)

    def _round_input(
        self, role: str, activation: Activation, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor]:
        known = self._guide.matrices.get(role)
        return (self._round(inputs[0], activation, known.input if known else None),)

    def _round_output(
        self, role: str, activation: Activation, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        known = self._guide.matrices.get(role)
        # INT16 products are scaled back by multipliers of 16 bits, which can be off by a step or two.
        near = 0.5 + _NEAR if _BITS[activation.type] == 8 else 2.5
        return self._round(output, activation, known.output if known else None, near)

    def _attention(self, name: str, layer: Layer, scheme: AttentionScheme, x: Tensor, view: View) -> Tensor:
        """The layer's attention, with its four roundings; batch and queries of one."""
        k, v = view.keys, view.values  # [1, Hkv, S, D]
        dim, heads = layer.layer.head_dim, layer.layer.num_kv_heads
        queries, products, probabilities, results = self._guide.products.get(name) or (None,) * 4
        q = layer.q_norm(layer.q_proj(x).view(1, 1, -1, dim))
        q = turn(q, view.angles).view(1, heads, -1, dim)  # [1, Hkv, G, D]
        q = self._round(q, scheme.queries, queries)
        seen = None if products is None else products[..., : k.shape[2]]
        scores = self._round(q @ k.transpose(2, 3), scheme.scores, seen)  # [1, Hkv, G, S]
        scores = scores * layer.config.attention_scale
        if view.bias is not None:
            scores = scores + view.bias
        seen = None if probabilities is None else probabilities[..., : k.shape[2]]
        weights = self._round(scores.softmax(-1), scheme.probabilities, seen)
        out: Tensor = layer.o_proj(self._round(weights @ v, scheme.mixed, results).reshape(1, 1, -1))
        return out

    def _round(
        self, x: Tensor, activation: Activation, interpreted: Tensor | None, near: float = 0.5 + _NEAR
    ) -> Tensor:
        limit = 1 << (_BITS[activation.type] - 1)
        steps = (x / activation.scale + activation.zero_point).clamp(-limit, limit - 1)
        codes = ((x / activation.scale).round() + activation.zero_point).clamp(-limit, limit - 1)
        if interpreted is not None:
            known = (interpreted.reshape(x.shape) / activation.scale).round() + activation.zero_point
            settled = torch.where((steps - known).abs() <= near, known, codes)
            self._count(settled != codes)
            codes = settled
        return (codes - activation.zero_point) * activation.scale

    def _count(self, moved: Tensor) -> None:
        self._counts[0] += int(moved.sum())
        self._counts[1] += moved.numel()


def quantize_rows(x: Tensor, kernels: Kernels) -> Tensor:
    """``x`` [..., width] as it comes back from INT8, each row quantized by its own range."""
    if kernels is Kernels.BUILTIN:
        scale = x.abs().amax(-1, keepdim=True) / 127
        scale = torch.where(scale == 0, 1.0, scale)
        return (x / scale).round().clamp(-127, 127) * scale
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    per_unit = torch.where(low == high, 1.0, 255.0 / (high - low))
    zero_point = (-128 - low * per_unit).clamp(-128, 127).round()
    codes = ((x * per_unit).round() + zero_point).clamp(-128, 127)
    return (codes - zero_point) / per_unit
