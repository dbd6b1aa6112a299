"""What one round asks of a device: operators, and copies from and to it, counted on a machine that has none.

The pair is moved to PyTorch's ``meta`` device, which has shapes and no numbers. Whatever would read a number of it in
Python (``item``, ``bool``, an index by a mask) raises, so a round that runs there depends on no value; and every copy
from or to the host is an operator between two devices, or a tensor made there of Python's numbers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtp_extract.speculate.generate import Options, SpeculativeGenerator, _Run

__all__ = ["Dispatched", "rounds_on_meta"]

_WHOLE = (torch.ops.aten.scaled_dot_product_attention, torch.ops.prim.device)


@dataclass
class Dispatched:
    """Of one round.

    Attributes:
        waits: tables copied to the host.
        copies: operators that read from one device and write to another, and tensors made of numbers.
        operators: name → how many, composites opened up.
        converted: numbers turned from one floating-point type into another.
    """

    waits: int = 0
    copies: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    converted: int = 0


class _Counting(TorchDispatchMode):
    def __init__(self, found: Dispatched) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket not in _WHOLE:
            with self:
                opened = func.decompose(*args, **kwargs)
            if opened is not NotImplemented:
                return opened
        out = func(*args, **kwargs)
        if func._overloadpacket is not torch.ops.prim.device:
            self.found.operators[str(func._overloadpacket)] += 1
            # A number in a tensor of no dimension is an argument, not a copy.
            read = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}
            written = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)}
            self.found.copies += bool(read) and read != written
            if (
                func._overloadpacket is torch.ops.aten._to_copy
                and out.dtype != args[0].dtype
                and out.dtype.is_floating_point
            ):
                self.found.converted += out.numel()
        return out


@contextlib.contextmanager
def _made_up(tables: list[int], made: list[int]) -> Iterator[None]:
    """Every table that is read from ``meta`` holds ones; its size is noted, and that of tensors made there."""
    read, make = Tensor.tolist, torch.tensor

    def tolist(self: Tensor) -> Any:
        if self.device.type != "meta":
            return read(self)
        tables.append(self.numel())
        return [[1] * self.shape[1] for _ in range(self.shape[0])]

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        out = make(*args, **kwargs)
        if out.device.type == "meta":
            made.append(out.numel())
        return out

    with mock.patch.object(Tensor, "tolist", tolist), mock.patch.object(torch, "tensor", tensor):
        yield


def rounds_on_meta(base: Any, drafter: Any, options: Options, batch: int = 1) -> list[Dispatched]:
    """The second and third round of ``batch`` prompts of three tokens. ``base`` and ``drafter`` end up on ``meta``."""
    generator = SpeculativeGenerator(base, drafter)
    base.to("meta")
    drafter.to("meta")
    tables: list[int] = []
    made: list[int] = []
    result = []
    with _made_up(tables, made):
        events = _Run(generator, [(1, 2, 3)] * batch, options).rounds()
        for _ in range(2 * batch):  # the first tokens, and a round
            next(events)
        for _ in range(2):
            found, before, began = Dispatched(), len(tables), len(made)
            with _Counting(found):
                next(events)
            found.waits = len(tables) - before
            found.copies += len(made) - began
            result.append(found)
            for _ in range(batch - 1):
                next(events)
    return result
