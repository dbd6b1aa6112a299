"""Match the blocks of drafter and base as whole expressions: matrix, norm, residual sum, gated product.

A match records the constants of its block as weights with roles. Numbers that an exporter folded into a weight become
the role's factor: stored = factor × weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mtp_extract.errors import RoleError, UnsupportedError
from mtp_extract.graph.expressions import LARGEST_FACTOR, Expr, Term
from mtp_extract.graph.flat import Value
from mtp_extract.graph.forms import ReadGraph
from mtp_extract.graph.roles import FoundRole, read_activation
from mtp_extract.litertlm.storage import NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor

_CLOSE = 1e-5
_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
"""GELU(x) ≈ x/2 · (1 + tanh(slope · (x + cube · x³)))."""


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of ``factor × of`` over every ``width`` elements, times ``weight``."""

    of: Expr
    weight: Expr | None  # None if it has no weight, or a single number
    width: int
    factor: float  # matters because of ``eps``, which is added to the mean of squares
    eps: float


class Blocks:
    """Matcher of blocks in the expressions of one graph.

    Methods ``take_…`` record the constants of a block in ``roles`` and return what the block reads; a RoleError says
    that the graph has something else there.
    """

    factor_tolerance = 1e-6  # a factor on a weight that is nearer to 1 counts as 1

    def __init__(self, reading: ReadGraph) -> None:
        self.reading = reading
        self.graph = reading.graph
        self.expressions = reading.expressions
        self.roles: list[FoundRole] = []
        self.eps: set[float] = set()
        self.activations: set[str] = set()
        self.matched: Expr | None = None  # the expression being matched, or the one that was refused

    def read_output(self, name: str) -> tuple[Expr, float]:
        """Return the expression and the factor of the output ``name``."""
        form = self.reading.forms.get(id(self.graph.outputs[name]))
        if not isinstance(form, Term) or not form.is_complete:
            raise RoleError(
                f"The output {name!r} is not computed of the activations, or has its elements in another order."
            )
        return form.expr, form.factor

    def find_norms(self) -> dict[int, Expr]:
        """Return, by ``id`` of a value, the norm that the value is or takes its elements from."""
        norms = dict[int, Expr]()
        for key, form in self.reading.forms.items():
            if isinstance(form, Term):
                expr, _ = self.expressions.find_origin(form.expr, form.ids)
                if self.match_norm(expr) is not None:
                    norms[key] = expr
        return norms

    @staticmethod
    def describe(expr: Expr) -> str:
        """Return a name for messages: "a product", or an operator that could not be read, with the reason."""
        if expr.kind != "unread":
            return f"a {expr.kind}"
        value, why = expr.parts
        return f"{value.producer.op.label}, which {why}" if value.producer is not None else f"the input {value.label}"

    # Matrices.

    def take_matrix(self, role: str, expr: Expr, factor: float, meant: float | None = None) -> Expr:
        """Take the matrix of the product ``factor × expr``, and return what it multiplies.

        ``meant`` is the factor on that operand in the model's definition; None stands for :meth:`find_scale` of it.
        """
        self.matched = expr
        if expr.kind != "matrix":
            raise RoleError(f"{role}: expected a product with a matrix, found {self.describe(expr)}.")
        weight: Value = expr.parts[0]
        operand: Expr = expr.parts[1]
        node = self.reading.products[expr]
        if weight.tensor.type not in NUMBER_TYPES:
            raise UnsupportedError(f"{role}: {weight.label} is stored in a way that this release cannot read.")

        stored = (self.find_scale(operand) if meant is None else meant) / factor
        if not 1 / LARGEST_FACTOR < abs(stored) < LARGEST_FACTOR:
            raise UnsupportedError(f"{role}: its weight is stored {stored:g} times as large.")
        columns = weight.tensor.shape[1]
        tokens = operand.size // columns
        shape = expr.size // tokens, columns
        folded = 1.0 if abs(stored - 1) < self.factor_tolerance else stored
        quantized = read_activation(node.get_operand(0)), read_activation(node.outputs[0])
        result, _ = self.reading.first[expr]
        why = f"weight of {node.op.label}"
        self.roles.append(FoundRole(role, weight.tensor, shape, folded, why, (), *quantized, result))
        return operand

    def require_input(self, role: str, expr: Expr, name: str) -> None:
        self.matched = expr
        if expr.kind != "input" or expr.parts[0] != name:
            raise RoleError(f"{role}: expected it to read the input {name!r}, found {self.describe(expr)}.")

    def take_lm_head(self, logits: Expr, factor: float) -> tuple[float | None, Expr]:
        """Take the head; return the soft cap of ``factor × logits`` (None without one), and what the head reads."""
        if logits.kind != "function" or logits.parts[0] != "TANH":
            return None, self.take_matrix("lm_head", logits, factor)
        _, inner, product = logits.parts
        if factor < 0:
            raise UnsupportedError(f"lm_head: its soft cap is {factor:g}; no drafter has a negative one.")
        return factor, self.take_matrix("lm_head", product, inner * factor)

    # Norms.

    def match_norm(self, expr: Expr) -> Norm | None:
        """Return ``expr`` as an RMSNorm, x · (Σ x² · number + ε)^−½ · weight; None if it is another function."""
        powers = expr.powers
        roots = [e for e, power in powers.items() if power == -0.5]
        weights = [e for e, power in powers.items() if power == 1 and _is_weight(e)]
        if len(roots) != 1 or len(weights) > 1:
            return None
        root = roots[0].parts[0] if roots[0].kind == "each" else roots[0]
        squares = [e for e in root.terms if e.kind == "groups"]
        eps = root.terms.get(self.expressions.one, 0.0)
        if len(root.terms) != 2 or len(squares) != 1 or eps <= 0:
            return None
        # The vector that is squared under the root must be the one that is divided by the root.
        squared, width = squares[0].parts
        normed = {e: power for e, power in powers.items() if e not in (*roots, *weights)}
        if {e: 2 * power for e, power in normed.items()} != squared.powers:
            return None
        factor = math.sqrt(root.terms[squares[0]] * width)
        of = self.expressions.make_product(normed, expr.size)
        return Norm(of, weights[0] if weights else None, width, 1.0 if is_close(factor, 1) else factor, eps)

    def take_norm(self, role: str, expr: Expr) -> tuple[Expr, float]:
        """Take a norm, and return the expression that it normalizes, with the factor of that."""
        self.matched = expr
        norm = self.match_norm(expr)
        if norm is None:
            raise RoleError(f"{role}: expected an RMSNorm, found {self.describe(expr)}.")
        self.eps.add(float(f"{norm.eps:.6g}"))
        result, norm_factor, number = self.find_result(expr)
        if number is None and not is_close(abs(norm_factor), norm.factor):
            raise UnsupportedError(f"{role}: it is {norm_factor / norm.factor:g} times a norm.")
        tensor = self._find_norm_weight(role, norm) if number is None else number.tensor
        why = "its weight was 1 and was folded away" if tensor is None else "weight of an RMSNorm"
        names = tuple(t.name for t in result.tensors)
        self.roles.append(FoundRole(role, tensor, (norm.width,), 1.0, why, names, result=result))
        return norm.of, math.copysign(norm.factor, 1.0 if number is not None else norm_factor)

    @staticmethod
    def _find_norm_weight(role: str, norm: Norm) -> Tensor | None:
        if norm.weight is None:
            return None
        weight = norm.weight.parts[0] if norm.weight.kind == "tiled" else norm.weight
        tensor: Tensor = weight.parts[0].tensor
        if tensor.elements != norm.width or tensor.shape[-1] != norm.width:
            raise UnsupportedError(f"{role}: its weight has {tensor.elements} elements, its axis {norm.width}.")
        return tensor

    def take_norm_of_stream(self, role: str, normed: Expr, stream: Expr, factor: float) -> None:
        """Take a norm, which has to be of ``factor × stream``."""
        of, norm_factor = self.take_norm(role, normed)
        if of is not stream or not is_close(norm_factor, factor):
            raise RoleError(f"{role} does not read the residual stream.")

    def find_result(self, expr: Expr) -> tuple[Value, float, Value | None]:
        """Return the value that holds a norm's result, its factor there, and the number that is all its weights."""
        norm = self.match_norm(expr)
        if norm is not None and norm.weight is None:
            for term, value in self.reading.scaled.get(expr, ()):
                number = term.numbers[-1]
                if number.constant and is_close(
                    term.factor, norm.factor * float(self.graph.read_small_floats(number)[0])
                ):
                    return value, term.factor, number
        return *self.reading.first[expr], None

    def find_scale(self, expr: Expr) -> float:
        """Return s where the norm's result is s × ``expr``; 1 if ``expr`` is no norm."""
        return self.find_result(expr)[1] if self.match_norm(expr) is not None else 1.0

    def require_one_epsilon(self) -> float:
        """Return the epsilon that all norms share; raise UnsupportedError if there are several."""
        if len(self.eps) != 1:
            raise UnsupportedError(f"The norms use different epsilons: {sorted(self.eps)}.")
        (eps,) = self.eps
        for label, declared in self.graph.epsilons.items():
            if not is_close(declared, eps):
                raise UnsupportedError(
                    f"{label} declares the epsilon {declared:g} and computes with {eps:g}: which of the two a runtime "
                    "uses depends on its hardware."
                )
        return eps

    # Layers.

    def count_layers(self, stream: Expr, *, sums: int) -> int:
        """Return how many layers ``stream`` has gone through; each adds the results of ``sums`` norms to it."""
        count = 0
        while stream.kind == "sum":
            below = [e for e in stream.terms if self.match_norm(e) is None]
            if len(below) != 1:
                break
            stream, count = below[0], count + 1
        return -(-count // sums) + (stream.kind == "sum")

    def take_attention(self, name: str, out: Expr, query_of: Callable[[str, Expr], Expr]) -> tuple[Expr, Expr, float]:
        """Take feed-forward block and attention of the layer ``name``, whose residual sum is ``out``.

        ``query_of`` returns the normed query, given the layer's name and the expression that ``o_proj`` reads.

        Returns:
            the expression that the projections of the attention read, the stream below the layer, and its factor.
        """
        branch, stream, below = self.split_residual(name, self.take_feed_forward(name, out))
        mixed = self.take_matrix(f"{name}.o_proj", *self.take_norm(f"{name}.post_attention_norm", branch))
        fed = self.take_matrix(f"{name}.q_proj", *self.take_norm(f"{name}.q_norm", query_of(name, mixed)))
        self.take_norm_of_stream(f"{name}.pre_attention_norm", fed, stream, below)
        return fed, stream, below

    def take_layer_scalar(self, name: str, out: Expr, factor: float) -> None:
        """Take the number that multiplies a layer's result, if there is one."""
        self.matched = out
        for term, value in self.reading.scaled.get(out, ()):
            if is_close(term.factor, factor):
                number, *others = term.numbers
                if (
                    others
                    or not number.constant
                    or not is_close(float(self.graph.read_small_floats(number)[0]), factor)
                ):
                    raise UnsupportedError(f"{name}.layer_scalar: it is computed from several constants.")
                role, names = f"{name}.layer_scalar", tuple(t.name for t in value.tensors)
                why = f"the factor {factor:g} on the layer's output"
                self.roles.append(FoundRole(role, number.tensor, (1,), 1.0, why, names, result=value))
                return
        if factor != 1:
            raise UnsupportedError(f"{name}.layer_scalar: no constant holds its factor {factor:g}.")

    def split_residual(self, name: str, total: Expr) -> tuple[Expr, Expr, float]:
        """Return the norm that is added to a stream, the stream, and the factor of the stream."""
        self.matched = total
        norms = [e for e in total.terms if self.match_norm(e) is not None]
        if len(total.terms) != 2 or len(norms) != 1 or not is_close(total.terms[norms[0]], self.find_scale(norms[0])):
            found = self.describe(total)
            raise RoleError(f"{name}: expected the sum of the residual stream and a norm, found {found}.")
        (stream,) = (e for e in total.terms if e is not norms[0])
        return norms[0], stream, total.terms[stream]

    def take_feed_forward(self, name: str, out: Expr) -> Expr:
        """Take the feed-forward block whose residual sum is ``out``, and return the stream below it."""
        branch, middle, factor = self.split_residual(name, out)
        if factor != 1:
            raise RoleError(f"{name}: its residual stream is scaled within the layer.")
        product, norm_factor = self.take_norm(f"{name}.post_ffw_norm", branch)
        self.matched = product
        if product.kind != "matrix":
            raise RoleError(f"{name}.down_proj: expected a product with a matrix, found {self.describe(product)}.")

        gate, scale, up, share = self.split_gated_product(f"{name}.gate_proj, {name}.up_proj", product.parts[1])
        normed = self.take_matrix(f"{name}.gate_proj", gate, scale)
        if self.take_matrix(f"{name}.up_proj", up, 1.0) is not normed:
            raise RoleError(f"{name}.gate_proj and {name}.up_proj read different values.")
        self.take_matrix(f"{name}.down_proj", product, norm_factor, meant=1 / share)
        self.take_norm_of_stream(f"{name}.pre_ffw_norm", normed, middle, 1.0)
        return middle

    # Gated products.

    def split_gated_product(self, names: str, product: Expr) -> tuple[Expr, float, Expr, float]:
        """Return gate, scale, up and share of the product ``share · GELU(scale · gate) · up``."""
        self.matched = product
        for up, power in product.powers.items():
            if power != 1 or up.kind not in ("matrix", "part", "input"):
                continue
            factors = {e: p for e, p in product.powers.items() if e is not up}
            for gate, activation, scale, share in self._list_gates(factors):
                if gate is not up:
                    self.activations.add(activation)
                    return gate, scale, up, 1.0 if is_close(share, 1) else share
        raise RoleError(f"{names}: expected a product of GELU(gate) and up; the graph computes another function.")

    def require_one_activation(self) -> str:
        """Return transformers' name of the function that all gates use; raise UnsupportedError if there are several."""
        if len(self.activations) > 1:
            raise UnsupportedError(f"The gates use different functions: {sorted(self.activations)}.")
        return self.activations.pop() if self.activations else "gelu_pytorch_tanh"

    def _list_gates(self, powers: dict[Expr, float]) -> Iterator[tuple[Expr, str, float, float]]:
        """Yield gate, function name, scale and share for each reading as ``share · function(scale · gate)``."""
        if list(powers.values()) == [1]:
            (function,) = powers
            if function.kind == "function" and function.parts[0] in ("GELU", "GELU_TANH"):
                name, scale, gate = function.parts
                yield gate, "gelu" if name == "GELU" else "gelu_pytorch_tanh", scale, 1.0
        for gate, power in powers.items():
            halves = [e for e in powers if e is not gate]
            if power == 1 and len(halves) == 1 and powers[halves[0]] == 1:
                activation = self._match_half_of_gelu(halves[0], gate)
                if activation is not None:
                    scale, share = activation
                    yield gate, "gelu_pytorch_tanh", scale, share / scale

    def _match_half_of_gelu(self, half: Expr, gate: Expr) -> tuple[float, float] | None:
        """Return scale and share of ``share/2 · (1 + tanh(slope · (scale · gate + cube · (scale · gate)³)))``."""
        unit = half.terms.get(self.expressions.one, 0.0)
        function = next((e for e in half.terms if e.kind == "function"), None)
        if function is None or len(half.terms) != 2 or not is_close(half.terms[function], unit):
            return None
        name, factor, inner = function.parts
        cubed = self.expressions.make_product({gate: 3.0}, gate.size)
        if name != "TANH" or set(inner.terms) != {gate, cubed}:
            return None
        scale = inner.terms[gate] * factor / _GELU_SLOPE
        cube = inner.terms[cubed] * factor
        return (scale, 2 * unit) if is_close(cube, _GELU_SLOPE * _GELU_CUBE * scale**3) else None


def _is_weight(expr: Expr) -> bool:
    """Return whether ``expr`` is a stored vector, possibly repeated for every group."""
    return (expr.parts[0] if expr.kind == "tiled" else expr).kind == "weight"
