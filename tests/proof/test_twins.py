"""Drafters built to the inventories of Google's files: changed ones are refused, other words for the same are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adversary.judge import computed
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers
from helpers.make_bundle import Memory, load
from helpers.surgery import Graph
from helpers.variant_files import variant
from seam import MtpExtractError, UnsupportedError, checkpoint_of, flat, prove, read

MAY, APRIL = "twin_e4b_may", "twin_e2b_april"
FULL = 3
"""The layer that ``mask`` decides; in the others the window is in the graph."""
LEGAL = ("one", "past", "holes")
Change = Callable[[Graph], object]
Arrays = dict[str, npt.NDArray[Any]]


def twin(name: str) -> Graph:
    return Graph(load(variant(name).read_bytes()), {})


def of_kind(g: Graph, kind: str) -> list[Any]:
    return [op for op in g.ops if g.kind(op) == kind]


def masked(g: Graph, layer: int) -> Any:
    """The selection that hides scores."""
    return of_kind(g, "SELECT_V2")[2 * layer]


def guard(g: Graph, layer: int) -> Any:
    """The selection between what heads mixed and 0."""
    return of_kind(g, "SELECT_V2")[2 * layer + 1]


def compared(g: Graph, layer: int) -> Any:
    """The comparison that a guard chooses by."""
    return g.producer(int(guard(g, layer).inputs[0]))


def reduction(g: Graph, layer: int) -> Any:
    return next(op for op in g.before(int(guard(g, layer).inputs[0])) if g.kind(op) == "REDUCE_MAX")


def number(g: Graph, value: float) -> int:
    return g.constant(np.float32(value))


# Changes of an operand, which make another function.


def condition(edit: Callable[[Graph, int], int], layer: int = FULL) -> Change:
    return lambda g: g.set_input(guard(g, layer), 0, edit(g, int(guard(g, layer).inputs[0])))


def threshold(value: float, layer: int = FULL) -> Change:
    return lambda g: g.set_input(compared(g, layer), 1, number(g, value))


def above(kind: str, value: float) -> Change:
    def change(g: Graph) -> None:
        g.recode(compared(g, FULL), kind)
        threshold(value)(g)

    return change


def guarded(edit: Callable[[Graph, int], int], layer: int = FULL) -> Change:
    """Let the guard choose ``edit`` of what heads mixed."""
    return lambda g: g.set_input(guard(g, layer), 1, edit(g, int(guard(g, layer).inputs[1])))


def swap(g: Graph) -> None:
    op = guard(g, FULL)
    op.inputs = [op.inputs[0], op.inputs[2], op.inputs[1]]


def swap_and_invert(g: Graph) -> None:
    swap(g)
    condition(lambda g, x: g.call("LOGICAL_NOT", x))(g)


def guard_of_part(g: Graph) -> None:
    op = reduction(g, FULL)
    g.set_input(op, 0, g.part(int(op.inputs[0]), 0, 128))


def guard_of_head(g: Graph) -> None:
    """One head is closed where a slot is shown."""
    shape = g.shape(int(compared(g, FULL).inputs[0]))
    limits = np.zeros(shape, np.float32)
    limits.flat[1] = 1
    g.set_input(compared(g, FULL), 1, g.constant(limits))


def guard_twice(g: Graph) -> None:
    op = guard(g, FULL)
    made = int(op.outputs[0])
    condition_of_zero = g.call("EQUAL", int(compared(g, FULL).inputs[0]), number(g, 1))
    g.insert(made, lambda x: g.call("SELECT_V2", condition_of_zero, number(g, 0), x, shape=g.shape(x)), g.readers(made))


def any_guard(g: Graph) -> None:
    """REDUCE_ANY of a mask of bools."""
    op = reduction(g, FULL)
    mask, shape = g.input("mask"), g.shape(int(op.outputs[0]))
    axes = g.constant(np.array([1, 3]), np.int32)
    shown = g.tensor(shape[:1] + [1, 1][: len(shape) - 2], np.bool_)
    g.emit("REDUCE_ANY", [mask, axes], [shown], keepDims=False)
    g.set_input(guard(g, FULL), 0, g.reshape(shown, [1, 1, 1, 1]))


def product(g: Graph, number: int) -> Any:
    """A product with a cache: K, then V, layer by layer."""
    composites = of_kind(g, "STABLEHLO_COMPOSITE")
    return [op for op in composites if op.builtinOptions2.name == b"odml.runtime_bmm"][number]


def body(edit: Callable[[Graph], object], layer: int = 0, *, values: bool = False) -> Change:
    """Change the body of a product with K (or V) of ``layer``."""
    return lambda g: edit(g.body(product(g, 2 * layer + values)))


def one(g: Graph, kind: str, which: int = 0) -> Any:
    return of_kind(g, kind)[which]


def filled_with(value: float) -> Change:
    return body(lambda b: b.set_value(int(one(b, "FILL").inputs[1]), value))


def all_past_shown(g: Graph) -> None:
    """Of the window in the masks of all layers nothing is left but the causal half."""
    limit = int(one(g, "LESS").inputs[1])
    g.set_value(limit, g.value(limit) + 256)


def window_by(parameter: int) -> Change:
    return body(lambda b: b.set_value(int(one(b, "SLICE").inputs[1]), [0, 0, 0, parameter]))


def placed_at_0(b: Graph) -> None:
    pack = one(b, "PACK")
    b.set_input(pack, 3, int(pack.inputs[0]))


def window_longer(g: Graph) -> None:
    limit = int(one(g, "LESS").inputs[1])
    g.set_value(limit, g.value(limit) + 1)


def attribute(scale: float, layer: int = FULL, **others: Any) -> Change:
    def change(g: Graph) -> None:
        data = flexbuffers.Dumps({"is_global": True, "scale": scale, **others})
        product(g, 2 * layer).builtinOptions2.compositeAttributes = np.frombuffer(bytes(data), np.uint8)

    return change


@dataclass(frozen=True)
class Wrong:
    """A change that makes another function; ``shown`` are the masks under which Google's interpreter says so."""

    change: Change
    message: str
    file: str = MAY
    shown: tuple[str, ...] = LEGAL


ILLEGAL = ("none",)
"""Of rows that see no slot: these no runtime asks for, and a guard that is another there is not the layer's own."""
BEYOND = ()
"""Only accelerators compute otherwise, which read the attribute."""

WRONG = {
    "guard inverted": Wrong(condition(lambda g, x: g.call("LOGICAL_NOT", x)), "replaces what heads mixed by 0"),
    "guard of the window inverted": Wrong(condition(lambda g, x: g.call("LOGICAL_NOT", x), 0), "by 0 where a slot"),
    "guard not equal 1": Wrong(threshold(1), "replaces what heads mixed by 0"),
    "guard above 1": Wrong(above("GREATER", 1), "replaces what heads mixed by 0"),
    "guard never closed": Wrong(above("GREATER_EQUAL", 0), "sees no slot", shown=ILLEGAL),
    "guard by the minimum": Wrong(lambda g: g.recode(reduction(g, FULL), "REDUCE_MIN"), "0 reductions"),
    "guard of the window by the mask": Wrong(
        lambda g: g.set_input(guard(g, 0), 0, int(guard(g, FULL).inputs[0])), "other slots", shown=ILLEGAL
    ),
    "guard of the mask by the window": Wrong(
        lambda g: g.set_input(guard(g, FULL), 0, int(guard(g, 0).inputs[0])), "other slots", shown=ILLEGAL
    ),
    "guard with 1": Wrong(
        lambda g: g.set_input(guard(g, FULL), 2, number(g, 1)), "something else than 0", shown=ILLEGAL
    ),
    "guard's branches swapped": Wrong(swap, "replaces what heads mixed by 0"),
    "guard of half the slots": Wrong(guard_of_part, "some slots of a mask alone"),
    "guard of one head closed": Wrong(guard_of_head, "replaces what heads mixed by 0"),
    "guard twice": Wrong(guard_twice, "a second time"),
    "guard by the position too": Wrong(
        condition(lambda g, x: g.call("LOGICAL_AND", x, g.call("LESS", g.input("input_pos"), np.int32([30])))),
        "more than whether any slot is shown",
    ),
    "what heads mixed bounded beside the guard": Wrong(
        guarded(lambda g, x: g.call("MINIMUM", x, number(g, 0.5))), "is none that a drafter needs"
    ),
    "a factor by the position beside the guard": Wrong(
        guarded(
            lambda g, x: g.call("MUL", x, g.cast(g.call("LESS", g.input("input_pos"), np.int32([30])), np.float32))
        ),
        "an attention's output and 0",
    ),
    "scores shown where the mask hides": Wrong(
        lambda g: g.set_input(masked(g, FULL), 0, g.call("LOGICAL_NOT", int(masked(g, FULL).inputs[0]))), "position"
    ),
    "scores hidden by too little": Wrong(lambda g: g.set_input(masked(g, FULL), 2, number(g, -3)), "not lowered"),
    "the window inverted": Wrong(lambda g: g.recode(one(g, "LESS"), "GREATER"), "sliding window"),
    "filled with a score, the mask no window": Wrong(all_past_shown, "should be hidden, and is not", APRIL),
    "the window by its first parameter": Wrong(window_by(0), "Engines hand each type", APRIL),
    "the window by a parameter that is 0": Wrong(window_by(3), "do not belong", APRIL),
    "scores of a window put elsewhere": Wrong(body(placed_at_0), "do not belong", APRIL),
    "the mask's window longer than K's": Wrong(window_longer, "should be hidden, and is not", APRIL),
    "V of a window by another parameter": Wrong(
        body(lambda b: b.set_value(int(one(b, "SLICE").inputs[1]), [0, 0, 0, 3]), values=True), "slots", APRIL
    ),
    "the attribute's scale": Wrong(attribute(0.5), "attribute says that the scale", shown=BEYOND),
}
"""Changed drafters of Google's kind, each another function."""


# Google's interpreter.


def inputs(g: Graph, shown: str, position: int) -> Arrays:
    """Random activations and caches, and what the runtime hands over beside them, under the sound file's names."""
    random, made = np.random.default_rng(position), Arrays()
    for entry in g.model.signatureDefs[0].inputs:
        name, shape = entry.name.decode(), g.shape(entry.tensorIndex)
        if name == "activations":
            made[name] = random.standard_normal(shape).astype(np.float32)
        elif name.startswith("kv_cache_"):
            made[name] = random.integers(-127, 128, shape, np.int8)
    slots = np.arange(256)
    masks = {"one": slots == position, "past": slots <= position, "none": slots < 0}
    masks["holes"] = (masks["past"] & (random.random(256) > 0.25)) | masks["one"]
    made["mask"] = masks[shown].reshape(1, 1, 1, -1)
    made["input_pos"] = np.array([position], np.int32)
    made["param_tensor"] = np.array([position, position + 1, position + 1, 0, 0, 0, 0], np.int32).reshape(1, 1, 1, 7)
    return made


def projected(g: Graph, file: str, shown: str, position: int) -> npt.NDArray[np.float32]:
    """What Google's interpreter computes of ``g``, a changed ``file``."""
    g.tidy()
    ((_, state),) = computed(g, (inputs(twin(file), shown, position),), exact=True)
    return state


@cache
def sound(file: str, shown: str, position: int) -> npt.NDArray[np.float32]:
    return projected(twin(file), file, shown, position)


def apart(case: Wrong) -> float:
    """The largest difference from the sound file, as a share of its range."""
    largest = 0.0
    for shown, position in itertools.product(case.shown, (3, 200)):
        g = twin(case.file)
        case.change(g)
        expected = sound(case.file, shown, position)
        found = projected(g, case.file, shown, position)
        largest = max(largest, float(np.abs(found - expected).max() / np.ptp(expected)))
    return largest


@pytest.mark.parametrize("name", WRONG)
def test_a_changed_drafter_is_refused(name: str) -> None:
    case = WRONG[name]
    g = twin(case.file)
    case.change(g)
    with pytest.raises(MtpExtractError, match=case.message):
        prove(Memory(g.data()))


@pytest.mark.parametrize("name", [name for name, case in WRONG.items() if case.shown])
def test_a_changed_drafter_is_another_function(name: str) -> None:
    assert apart(WRONG[name]) > 0.01


# Other words for the same function.


def rename(**names: str) -> Change:
    def change(g: Graph) -> None:
        for entry in g.model.signatureDefs[0].inputs:
            entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()

    return change


def mask_of(dtype: Any) -> Change:
    """The mask as floats: 0 where it shows a slot, a large negative number where not."""

    def change(g: Graph) -> None:
        mask = g.input("mask")
        readers = g.readers(mask)
        g.main.tensors[mask].type = {np.float32: schema.TensorType.FLOAT32, np.float16: schema.TensorType.FLOAT16}[
            dtype
        ]
        wide = mask if dtype is np.float32 else g.cast(mask, np.float32)
        g.rewire(mask, g.call("GREATER_EQUAL", wide, number(g, -1)), readers)

    return change


SOUND: dict[str, tuple[Change, str]] = {
    "nothing changed in May": (lambda g: None, MAY),
    "nothing changed in April": (lambda g: None, APRIL),
    "attn_mask and positions": (rename(mask="attn_mask", input_pos="positions"), MAY),
    "mask_global": (rename(mask="mask_global"), APRIL),
    "a mask of FLOAT32": (mask_of(np.float32), MAY),
    "a mask of FLOAT16": (mask_of(np.float16), MAY),
    "the condition and the branches inverted": (swap_and_invert, MAY),
    "a guard above one half": (above("GREATER", 0.5), MAY),
    "a guard by REDUCE_ANY": (any_guard, MAY),
    "FILL with another number under the mask": (filled_with(7), APRIL),
    "other attributes beside the scale": (
        lambda g: attribute(float(g.main.tensors[g.input("kv_cache_k_23")].quantization.scale[0]), x=[[1]])(g),
        MAY,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_other_words_for_the_same_are_read(name: str) -> None:
    change, file = SOUND[name]
    g = twin(file)
    change(g)
    config = read(Memory(g.data())).config
    assert config == read(Memory(twin(file).data())).config
    assert prove(Memory(g.data()))["mask_rows"] == {"computed": 2, "of": 256, "alike": True}


def test_a_factor_beside_the_guard_is_that_of_the_o_projection() -> None:
    g = twin(MAY)
    guarded(lambda g, x: g.call("MUL", x, number(g, 2)))(g)
    doubled, stored = (checkpoint_of(read(Memory(m.data()))).tensors for m in (g, twin(MAY)))
    role = f"layers.{FULL}.o_proj"
    np.testing.assert_array_equal(doubled[role].array(), 2 * stored[role].array())
    assert prove(Memory(g.data()))["positions"] == 256


# What runtimes hand over.


def test_a_window_that_no_mask_confirms_needs_the_parameters() -> None:
    """Without ``param_tensor`` a mask may have holes that the sliding layers do not see."""
    g = twin(MAY)
    rename(param_tensor="parameters")(g)
    with pytest.raises(MtpExtractError, match=r"layers\.0\.attention.*position"):
        prove(Memory(g.data()))


def test_a_mask_that_no_layer_reads_is_refused() -> None:
    g = twin(MAY)
    shown = g.reshape(int(one(g, "GREATER_EQUAL").outputs[0]), [1, 1, 1, 256])
    mask = g.input("mask")
    g.rewire(mask, shown, g.readers(mask))
    with pytest.raises(MtpExtractError, match=r"layers\.3\.attention.*position"):
        prove(Memory(g.data()))


@pytest.mark.parametrize("name", ["local_mask", "attn_mask_local", "local_attn_mask", "mask_local"])
def test_a_name_tells_a_local_mask(name: str) -> None:
    g = twin(MAY)
    rename(mask=name)(g)
    graph = flat(g.data())
    assert "mask" not in graph.inputs
    assert graph.inputs["mask_local"].tensor.type_name == "BOOL"
    assert graph.input_names[name] == "mask_local"


# Drafters of another kind.


def named(name: bytes, tensor: int) -> Any:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = name, tensor
    return entry


def with_input(name: bytes, shape: list[int], dtype: Any) -> Change:
    def change(g: Graph) -> None:
        g.main.inputs = [*g.main.inputs, g.tensor(shape, dtype)]
        g.model.signatureDefs[0].inputs.append(named(name, g.main.inputs[-1]))

    return change


def own_caches(g: Graph) -> None:
    g.model.signatureDefs[0].outputs.append(named(b"kv_cache_k_0", g.output("logits")))


def draft_signature(g: Graph) -> None:
    g.model.signatureDefs[0].signatureKey = b"draft"
    g.model.signatureDefs[0].outputs[0].name = b"tokens"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (with_input(b"local_mask", [1, 1, 1, 32], np.bool_), "ring-buffer caches"),
        (own_caches, "K and V of its own"),
        (with_input(b"pos_emb_cos", [1, 1, 1, 16], np.float32), "for an NPU"),
        (draft_signature, "the signature 'draft', as of Qwen3.5's"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_what_it_is(change: Change, kind: str) -> None:
    g = twin(MAY)
    change(g)
    with pytest.raises(UnsupportedError, match=f"a drafter of another kind .*{kind}.*this release does not read"):
        read(Memory(g.data()))


def test_attributes_that_are_damaged_are_refused_in_one_line() -> None:
    g = twin(MAY)
    op = of_kind(g, "STABLEHLO_COMPOSITE")[0]
    damaged = bytearray(flexbuffers.Dumps({"epsilon": 1e-6, "scale": 0.5}))
    damaged[-5] = 0x8B  # the type of the first value
    op.builtinOptions2.compositeAttributes = np.frombuffer(bytes(damaged), np.uint8)
    with pytest.raises(UnsupportedError, match="attributes that cannot be read"):
        read(Memory(g.data()))
