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
from seam import MtpExtractError, UnsupportedError, build_checkpoint, flat, prove, read

MAY, APRIL = "twin_e4b_may", "twin_e2b_april"
FULL = 3
"""The layer that ``mask`` decides; in the others the window is in the graph."""
LEGAL = ("one", "past", "holes")
Change = Callable[[Graph], object]
Arrays = dict[str, npt.NDArray[Any]]


def load_twin(name: str) -> Graph:
    return Graph(load(variant(name).read_bytes()), {})


def list_ops(g: Graph, kind: str) -> list[Any]:
    return [op for op in g.ops if g.kind(op) == kind]


def find_masking(g: Graph, layer: int) -> Any:
    """The selection that hides scores."""
    return list_ops(g, "SELECT_V2")[2 * layer]


def find_guard(g: Graph, layer: int) -> Any:
    """The selection between the attention's output and 0."""
    return list_ops(g, "SELECT_V2")[2 * layer + 1]


def find_comparison(g: Graph, layer: int) -> Any:
    """The comparison that a guard chooses by."""
    return g.producer(int(find_guard(g, layer).inputs[0]))


def find_reduction(g: Graph, layer: int) -> Any:
    return next(op for op in g.before(int(find_guard(g, layer).inputs[0])) if g.kind(op) == "REDUCE_MAX")


def add_number(g: Graph, value: float) -> int:
    return g.constant(np.float32(value))


# Changes of an operand, which make another function.


def edit_condition(edit: Callable[[Graph, int], int], layer: int = FULL) -> Change:
    return lambda g: g.set_input(find_guard(g, layer), 0, edit(g, int(find_guard(g, layer).inputs[0])))


def set_threshold(value: float, layer: int = FULL) -> Change:
    return lambda g: g.set_input(find_comparison(g, layer), 1, add_number(g, value))


def compare_with(kind: str, value: float) -> Change:
    def change(g: Graph) -> None:
        g.recode(find_comparison(g, FULL), kind)
        set_threshold(value)(g)

    return change


def edit_guarded(edit: Callable[[Graph, int], int], layer: int = FULL) -> Change:
    """Let the guard choose ``edit`` of the attention's output."""
    return lambda g: g.set_input(find_guard(g, layer), 1, edit(g, int(find_guard(g, layer).inputs[1])))


def invert(g: Graph, x: int) -> int:
    return g.call("LOGICAL_NOT", x)


def swap_branches(g: Graph) -> None:
    op = find_guard(g, FULL)
    op.inputs = [op.inputs[0], op.inputs[2], op.inputs[1]]


def swap_branches_and_invert(g: Graph) -> None:
    swap_branches(g)
    edit_condition(invert)(g)


def guard_by_half_the_slots(g: Graph) -> None:
    op = find_reduction(g, FULL)
    g.set_input(op, 0, g.part(int(op.inputs[0]), 0, 128))


def close_one_head(g: Graph) -> None:
    """One head is closed where a slot is shown."""
    shape = g.shape(int(find_comparison(g, FULL).inputs[0]))
    limits = np.zeros(shape, np.float32)
    limits.flat[1] = 1
    g.set_input(find_comparison(g, FULL), 1, g.constant(limits))


def guard_twice(g: Graph) -> None:
    result = int(find_guard(g, FULL).outputs[0])
    condition_of_zero = g.call("EQUAL", int(find_comparison(g, FULL).inputs[0]), add_number(g, 1))
    g.insert(
        result,
        lambda x: g.call("SELECT_V2", condition_of_zero, add_number(g, 0), x, shape=g.shape(x)),
        g.readers(result),
    )


def guard_by_reduce_any(g: Graph) -> None:
    """REDUCE_ANY of a mask of bools."""
    op = find_reduction(g, FULL)
    mask, shape = g.input("mask"), g.shape(int(op.outputs[0]))
    axes = g.constant(np.array([1, 3]), np.int32)
    shown = g.tensor(shape[:1] + [1, 1][: len(shape) - 2], np.bool_)
    g.emit("REDUCE_ANY", [mask, axes], [shown], keepDims=False)
    g.set_input(find_guard(g, FULL), 0, g.reshape(shown, [1, 1, 1, 1]))


def find_cache_product(g: Graph, number: int) -> Any:
    """A product with a cache: K, then V, layer by layer."""
    composites = list_ops(g, "STABLEHLO_COMPOSITE")
    return [op for op in composites if op.builtinOptions2.name == b"odml.runtime_bmm"][number]


def edit_body(edit: Callable[[Graph], object], layer: int = 0, *, values: bool = False) -> Change:
    """Change the body of a product with K (or V) of ``layer``."""
    return lambda g: edit(g.body(find_cache_product(g, 2 * layer + values)))


def find_op(g: Graph, kind: str, which: int = 0) -> Any:
    return list_ops(g, kind)[which]


def fill_with(value: float) -> Change:
    return edit_body(lambda b: b.set_value(int(find_op(b, "FILL").inputs[1]), value))


def widen_window_by_256(g: Graph) -> None:
    """Of the window in the masks of all layers nothing is left but the causal half."""
    limit = int(find_op(g, "LESS").inputs[1])
    g.set_value(limit, g.value(limit) + 256)


def slice_by_parameter(parameter: int) -> Change:
    return edit_body(lambda b: b.set_value(int(find_op(b, "SLICE").inputs[1]), [0, 0, 0, parameter]))


def place_scores_at_0(b: Graph) -> None:
    pack = find_op(b, "PACK")
    b.set_input(pack, 3, int(pack.inputs[0]))


def widen_window(g: Graph) -> None:
    limit = int(find_op(g, "LESS").inputs[1])
    g.set_value(limit, g.value(limit) + 1)


def set_attribute(scale: float, layer: int = FULL, **others: Any) -> Change:
    def change(g: Graph) -> None:
        data = flexbuffers.Dumps({"is_global": True, "scale": scale, **others})
        find_cache_product(g, 2 * layer).builtinOptions2.compositeAttributes = np.frombuffer(bytes(data), np.uint8)

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
    "guard inverted": Wrong(edit_condition(invert), "replaces the attention's output by 0"),
    "guard of the window inverted": Wrong(edit_condition(invert, 0), "by 0 where a slot"),
    "guard not equal 1": Wrong(set_threshold(1), "replaces the attention's output by 0"),
    "guard above 1": Wrong(compare_with("GREATER", 1), "replaces the attention's output by 0"),
    "guard never closed": Wrong(compare_with("GREATER_EQUAL", 0), "sees no slot", shown=ILLEGAL),
    "guard by the minimum": Wrong(lambda g: g.recode(find_reduction(g, FULL), "REDUCE_MIN"), "0 reductions"),
    "guard of the window by the mask": Wrong(
        lambda g: g.set_input(find_guard(g, 0), 0, int(find_guard(g, FULL).inputs[0])), "other slots", shown=ILLEGAL
    ),
    "guard of the mask by the window": Wrong(
        lambda g: g.set_input(find_guard(g, FULL), 0, int(find_guard(g, 0).inputs[0])), "other slots", shown=ILLEGAL
    ),
    "guard with 1": Wrong(
        lambda g: g.set_input(find_guard(g, FULL), 2, add_number(g, 1)), "something else than 0", shown=ILLEGAL
    ),
    "guard's branches swapped": Wrong(swap_branches, "replaces the attention's output by 0"),
    "guard of half the slots": Wrong(guard_by_half_the_slots, "some slots of a mask alone"),
    "guard of one head closed": Wrong(close_one_head, "replaces the attention's output by 0"),
    "guard twice": Wrong(guard_twice, "a second time"),
    "guard by the position too": Wrong(
        edit_condition(lambda g, x: g.call("LOGICAL_AND", x, g.call("LESS", g.input("input_pos"), np.int32([30])))),
        "more than whether any slot is shown",
    ),
    "the attention's output bounded beside the guard": Wrong(
        edit_guarded(lambda g, x: g.call("MINIMUM", x, add_number(g, 0.5))), "is none that a drafter needs"
    ),
    "a factor by the position beside the guard": Wrong(
        edit_guarded(
            lambda g, x: g.call("MUL", x, g.cast(g.call("LESS", g.input("input_pos"), np.int32([30])), np.float32))
        ),
        "an attention's output and 0",
    ),
    "scores shown where the mask hides": Wrong(
        lambda g: g.set_input(find_masking(g, FULL), 0, invert(g, int(find_masking(g, FULL).inputs[0]))),
        "position",
    ),
    "scores hidden by too little": Wrong(
        lambda g: g.set_input(find_masking(g, FULL), 2, add_number(g, -3)), "not lowered"
    ),
    "the window inverted": Wrong(lambda g: g.recode(find_op(g, "LESS"), "GREATER"), "sliding window"),
    "filled with a score, the mask no window": Wrong(widen_window_by_256, "should be hidden, and is not", APRIL),
    "the window by its first parameter": Wrong(slice_by_parameter(0), "Engines hand each type", APRIL),
    "the window by a parameter that is 0": Wrong(slice_by_parameter(3), "do not belong", APRIL),
    "scores of a window put elsewhere": Wrong(edit_body(place_scores_at_0), "do not belong", APRIL),
    "the mask's window longer than K's": Wrong(widen_window, "should be hidden, and is not", APRIL),
    "V of a window by another parameter": Wrong(
        edit_body(lambda b: b.set_value(int(find_op(b, "SLICE").inputs[1]), [0, 0, 0, 3]), values=True), "slots", APRIL
    ),
    "the attribute's scale": Wrong(set_attribute(0.5), "attribute says that the scale", shown=BEYOND),
}
"""Changed drafters of Google's kind, each another function."""


# Google's interpreter.


def make_inputs(g: Graph, shown: str, position: int) -> Arrays:
    """Random activations and caches, and what the runtime hands over beside them, under the sound file's names."""
    random, arrays = np.random.default_rng(position), Arrays()
    for entry in g.model.signatureDefs[0].inputs:
        name, shape = entry.name.decode(), g.shape(entry.tensorIndex)
        if name == "activations":
            arrays[name] = random.standard_normal(shape).astype(np.float32)
        elif name.startswith("kv_cache_"):
            arrays[name] = random.integers(-127, 128, shape, np.int8)
    slots = np.arange(256)
    masks = {"one": slots == position, "past": slots <= position, "none": slots < 0}
    masks["holes"] = (masks["past"] & (random.random(256) > 0.25)) | masks["one"]
    arrays["mask"] = masks[shown].reshape(1, 1, 1, -1)
    arrays["input_pos"] = np.array([position], np.int32)
    arrays["param_tensor"] = np.array([position, position + 1, position + 1, 0, 0, 0, 0], np.int32).reshape(1, 1, 1, 7)
    return arrays


def run_interpreter(g: Graph, file: str, shown: str, position: int) -> npt.NDArray[np.float32]:
    """What Google's interpreter computes of ``g``, a changed ``file``."""
    g.tidy()
    ((_, state),) = computed(g, (make_inputs(load_twin(file), shown, position),), exact=True)
    return state


@cache
def run_sound(file: str, shown: str, position: int) -> npt.NDArray[np.float32]:
    return run_interpreter(load_twin(file), file, shown, position)


def measure_difference(case: Wrong) -> float:
    """The largest difference from the sound file, as a share of its range."""
    largest = 0.0
    for shown, position in itertools.product(case.shown, (3, 200)):
        g = load_twin(case.file)
        case.change(g)
        expected = run_sound(case.file, shown, position)
        state = run_interpreter(g, case.file, shown, position)
        largest = max(largest, float(np.abs(state - expected).max() / np.ptp(expected)))
    return largest


@pytest.mark.parametrize("name", WRONG)
def test_a_changed_drafter_is_refused(name: str) -> None:
    case = WRONG[name]
    g = load_twin(case.file)
    case.change(g)
    with pytest.raises(MtpExtractError, match=case.message):
        prove(Memory(g.data()))


@pytest.mark.parametrize("name", [name for name, case in WRONG.items() if case.shown])
def test_a_changed_drafter_is_another_function(name: str) -> None:
    assert measure_difference(WRONG[name]) > 0.01


# Other words for the same function.


def rename(**names: str) -> Change:
    def change(g: Graph) -> None:
        for entry in g.model.signatureDefs[0].inputs:
            entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()

    return change


def convert_mask(dtype: Any) -> Change:
    """The mask as floats: 0 where it shows a slot, a large negative number where not."""

    def change(g: Graph) -> None:
        mask = g.input("mask")
        readers = g.readers(mask)
        types = {np.float32: schema.TensorType.FLOAT32, np.float16: schema.TensorType.FLOAT16}
        g.main.tensors[mask].type = types[dtype]
        wide = mask if dtype is np.float32 else g.cast(mask, np.float32)
        g.rewire(mask, g.call("GREATER_EQUAL", wide, add_number(g, -1)), readers)

    return change


SOUND: dict[str, tuple[Change, str]] = {
    "nothing changed in May": (lambda g: None, MAY),
    "nothing changed in April": (lambda g: None, APRIL),
    "attn_mask and positions": (rename(mask="attn_mask", input_pos="positions"), MAY),
    "mask_global": (rename(mask="mask_global"), APRIL),
    "a mask of FLOAT32": (convert_mask(np.float32), MAY),
    "a mask of FLOAT16": (convert_mask(np.float16), MAY),
    "the condition and the branches inverted": (swap_branches_and_invert, MAY),
    "a guard above one half": (compare_with("GREATER", 0.5), MAY),
    "a guard by REDUCE_ANY": (guard_by_reduce_any, MAY),
    "FILL with another number under the mask": (fill_with(7), APRIL),
    "other attributes beside the scale": (
        lambda g: set_attribute(float(g.main.tensors[g.input("kv_cache_k_23")].quantization.scale[0]), x=[[1]])(g),
        MAY,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_other_words_for_the_same_are_read(name: str) -> None:
    change, file = SOUND[name]
    g = load_twin(file)
    change(g)
    config = read(Memory(g.data())).config
    assert config == read(Memory(load_twin(file).data())).config
    assert prove(Memory(g.data()))["mask_rows"] == {"computed": 2, "of": 256, "alike": True}


def test_a_factor_beside_the_guard_is_that_of_the_o_projection() -> None:
    g = load_twin(MAY)
    edit_guarded(lambda g, x: g.call("MUL", x, add_number(g, 2)))(g)
    doubled, stored = (build_checkpoint(read(Memory(m.data()))).tensors for m in (g, load_twin(MAY)))
    role = f"layers.{FULL}.o_proj"
    np.testing.assert_array_equal(doubled[role].array(), 2 * stored[role].array())
    assert prove(Memory(g.data()))["positions"] == 256


# What runtimes hand over.


def test_a_window_that_no_mask_confirms_needs_the_parameters() -> None:
    """Without ``param_tensor`` a mask may have holes that the sliding layers do not see."""
    g = load_twin(MAY)
    rename(param_tensor="parameters")(g)
    with pytest.raises(MtpExtractError, match=r"layers\.0\.attention.*position"):
        prove(Memory(g.data()))


def test_a_mask_that_no_layer_reads_is_refused() -> None:
    g = load_twin(MAY)
    shown = g.reshape(int(find_op(g, "GREATER_EQUAL").outputs[0]), [1, 1, 1, 256])
    mask = g.input("mask")
    g.rewire(mask, shown, g.readers(mask))
    with pytest.raises(MtpExtractError, match=r"layers\.3\.attention.*position"):
        prove(Memory(g.data()))


@pytest.mark.parametrize("name", ["local_mask", "attn_mask_local", "local_attn_mask", "mask_local"])
def test_a_name_tells_a_local_mask(name: str) -> None:
    g = load_twin(MAY)
    rename(mask=name)(g)
    graph = flat(g.data())
    assert "mask" not in graph.inputs
    assert graph.inputs["mask_local"].tensor.type_name == "BOOL"
    assert graph.input_names[name] == "mask_local"


# Drafters of another kind.


def make_mapping(name: bytes, tensor: int) -> Any:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = name, tensor
    return entry


def add_input(name: bytes, shape: list[int], dtype: Any) -> Change:
    def change(g: Graph) -> None:
        g.main.inputs = [*g.main.inputs, g.tensor(shape, dtype)]
        g.model.signatureDefs[0].inputs.append(make_mapping(name, g.main.inputs[-1]))

    return change


def add_cache_output(g: Graph) -> None:
    g.model.signatureDefs[0].outputs.append(make_mapping(b"kv_cache_k_0", g.output("logits")))


def rename_to_draft(g: Graph) -> None:
    g.model.signatureDefs[0].signatureKey = b"draft"
    g.model.signatureDefs[0].outputs[0].name = b"tokens"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (add_input(b"local_mask", [1, 1, 1, 32], np.bool_), "ring-buffer caches"),
        (add_cache_output, "K and V of its own"),
        (add_input(b"pos_emb_cos", [1, 1, 1, 16], np.float32), "for an NPU"),
        (rename_to_draft, "the signature 'draft', as of Qwen3.5's"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_what_it_is(change: Change, kind: str) -> None:
    g = load_twin(MAY)
    change(g)
    with pytest.raises(UnsupportedError, match=f"a drafter of another kind .*{kind}.*this release does not read"):
        read(Memory(g.data()))


def test_attributes_that_are_damaged_are_refused_in_one_line() -> None:
    g = load_twin(MAY)
    op = list_ops(g, "STABLEHLO_COMPOSITE")[0]
    damaged = bytearray(flexbuffers.Dumps({"epsilon": 1e-6, "scale": 0.5}))
    damaged[-5] = 0x8B  # the type of the first value
    op.builtinOptions2.compositeAttributes = np.frombuffer(bytes(damaged), np.uint8)
    with pytest.raises(UnsupportedError, match="attributes that cannot be read"):
        read(Memory(g.data()))
