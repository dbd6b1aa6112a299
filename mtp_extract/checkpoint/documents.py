"""Reads JSON objects of untrusted files, and compares a config with the one that we would write.

A format reads the keys that matter, builds the config that it would write for that drafter, and compares the two with
:func:`compare_document`. A key that changes the drafter's function is an error. Every other difference is a note, and
an error only where a proof is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from mtp_extract.errors import CheckpointError, escape, list_few
from mtp_extract.io.files import read_regular

_LARGEST = 1 << 26
"""Most bytes of a JSON file."""

_OFF: tuple[Any, ...] = (None, False, 0, [], {})
"""Values that mean *absent*."""

_LABELS = ("architectures",)
"""Keys that we write and engines choose a class by; nothing is computed from them."""

_FLOATS = "floats in BF16, F16 or F32"
_WITHOUT = "a drafter without it"

Danger = tuple[str, tuple[Any, ...], str]

DANGEROUS: Mapping[str, Danger] = MappingProxyType(
    {
        "quantization_config": ("weights quantized by another method", _OFF, _FLOATS),
        "quantization": ("weights quantized by another method", _OFF, _FLOATS),
        "kv_cache_scheme": ("quantized K and V", _OFF, _WITHOUT),
        "sparsity_config": ("sparse weights", _OFF, _FLOATS),
        "transform_config": ("transformed weights", _OFF, _FLOATS),
        "*put_activations": ("quantized activations", _OFF, _WITHOUT),
        "split.*": ("a file in several parts", _OFF, "one file"),
        "auto_map": ("code of its own", _OFF, _WITHOUT),
        "rope_scaling": ("scaled RoPE", _OFF, _WITHOUT),
        "rope.scal*": ("scaled RoPE", (*_OFF, 1, "none"), _WITHOUT),
        "rope_theta": ("another RoPE than what is said of it elsewhere", _OFF, "a config that says it once"),
        "partial_rotary_factor": ("another RoPE than what is said of it elsewhere", (None, 1), "a config of one RoPE"),
        "sliding_window": ("sliding attention", _OFF, _WITHOUT),
        "attn_logit_softcapping": ("a soft cap on attention scores", _OFF, _WITHOUT),
        "query_pre_attn_scalar": ("another scale of attention", _OFF, _WITHOUT),
        "attention.scale": ("another scale of attention", (None, 1), _WITHOUT),
        "*_scale": ("a factor on embeddings or logits", (None, 1), _WITHOUT),
        "is_causal": ("attention to later tokens", (None, True), _WITHOUT),
        "attention.causal": ("attention to later tokens", (None, True), _WITHOUT),
        "use_bidirectional_attention": ("attention to later tokens", (None, False, "vision"), _WITHOUT),
        "attention_bias": ("biases", _OFF, _WITHOUT),
        "mlp_bias": ("biases", _OFF, _WITHOUT),
        "enable_moe_block": ("experts", _OFF, _WITHOUT),
        "*expert*_count": ("experts", _OFF, _WITHOUT),
        "hidden_act": ("a gate that is no SiLU, which neither vLLM nor SGLang serves", (None, "silu"), "one with silu"),
        "hidden_size_per_layer_input": ("embeddings for every layer", (0,), _WITHOUT),
        "vocab_size_per_layer_input": ("embeddings for every layer", (0,), _WITHOUT),
    }
)
"""Keys that change the drafter's function where no format reads them: key → (meaning, values that change nothing, what
to ask for instead). ``*`` matches anything, and a key matches at any depth of the document."""

HARMLESS = (
    # The type of computation, the longest text, the origin, and settings of training.
    *("dtype", "torch_dtype", "*_token_id", "*_token_index", "max_position_embeddings", "initializer_range"),
    *("attention_dropout", "transformers_version", "_name_or_path", "problem_type", "use_cache", "_from_model_config"),
    # Further outputs of a model, of which a drafter has none.
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "id2label"),
    *("label2id", "return_dict"),
)
"""Keys that may have any value, since nothing is computed from them."""


@dataclass(frozen=True)
class Difference:
    """A place (keys joined by dots) at which a document differs, with both values; None means absent."""

    place: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        if self.found is None:
            return f"says nothing of {escape(self.place)}"
        return f"says {escape(self.place)} {escape(self.found)}"


@contextmanager
def report_damage(path: Path, damaged: str, advice: str = "Extract or fetch it again.") -> Iterator[None]:
    """Turn every error of opening or parsing the file at ``path`` into a CheckpointError that names it.

    Args:
        damaged: the message for a ValueError, whose text replaces ``{}``.
        advice: the end of the message.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}. {advice}") from error
    except RecursionError as error:
        raise CheckpointError(f"{escape(path)}: nested more deeply than any such file. {advice}") from error
    except ValueError as error:
        # Long enough for a name of full length and the reason after it.
        raise CheckpointError(f"{escape(path)}: {damaged.format(escape(error, 500))}. {advice}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: numbers are finite, and an object has each key once.

    Raises:
        ValueError, RecursionError: ``text`` is not such JSON, or nested too deeply.
    """

    def parse_finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return number

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(document := dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return document

    return json.loads(text, parse_constant=parse_finite, parse_float=parse_finite, object_pairs_hook=build_object)


def read_object(path: Path, advice: str = "Extract or fetch it again.") -> dict[str, Any]:
    """Read the JSON object in the file at ``path``, in UTF-8; ``advice`` ends an error's text.

    Raises:
        CheckpointError: the file cannot be read, is too large, or holds something else.
    """
    with report_damage(path, "not valid JSON ({})", advice):
        content = parse_json(read_regular(path, _LARGEST).decode("utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{escape(path)}: expected a JSON object, found a {type(content).__name__}. {advice}")
    return content


def find_differences(expected: Any, found: Any, close: float = 0.0, place: str = "") -> Iterator[Difference]:
    """Yield every place at which ``found`` differs from ``expected``, key by key. An absent key equals None.

    Floats may differ by the share ``close`` of the expected number.

    >>> list(find_differences({"a": {"b": 1}}, {"a": {"b": 2}}))
    [Difference(place='a.b', expected=1, found=2)]
    """
    if _is_list_of_objects(expected) and _is_list_of_objects(found):
        expected, found = ({str(index): value for index, value in enumerate(values)} for values in (expected, found))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in {**expected, **found}:
            yield from find_differences(expected.get(key), found.get(key), close, f"{place}.{key}" if place else key)
    elif not _is_close(expected, found, close):
        yield Difference(place, expected, found)


def _is_close(expected: Any, found: Any, close: float) -> bool:
    if not isinstance(expected, float) or not isinstance(found, int | float):
        return bool(expected == found)
    # Compared without subtracting: an integer of a config may be too large for a float.
    return expected - close * abs(expected) <= found <= expected + close * abs(expected)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value)


def compare_document(
    path: Path,
    document: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    harmless: Sequence[str] = (),
    means_the_same: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    computes: bool = True,
) -> tuple[str, ...]:
    """Compare the ``document`` in the file at ``path`` with the one that we would write for the same drafter.

    Args:
        harmless: further keys that may have any value, in the notation of :data:`DANGEROUS`.
        means_the_same: key → values that mean the same as the one that we would write.
        computes: whether keys of this file may change what the drafter computes; if not, no key is an error.

    Returns:
        At most one clause, which names the file and the keys that were not read or are missing.

    Raises:
        CheckpointError: a key of :data:`DANGEROUS`, or a key that we would write with another value, changes the
            drafter's function.
    """
    unread = list[Difference]()
    for difference in find_differences(expected, document):
        place = difference.place
        same = means_the_same.get(_find_pattern(place, means_the_same), ())
        danger = DANGEROUS.get(_find_pattern(place, DANGEROUS))
        if danger is not None:
            same += danger[1]
        elif difference.expected in _OFF:
            same += _OFF
        if difference.found in same or _find_pattern(place, (*HARMLESS, *harmless)):
            continue
        is_of_the_function = danger is not None or (difference.expected is not None and place not in _LABELS)
        if computes and is_of_the_function and difference.found is not None:
            _refuse_document(path, difference, danger)
        unread.append(difference)
    return (f"{escape(path.name)} {list_few(unread, separator=' and ')}",) if unread else ()


def _refuse_document(path: Path, difference: Difference, danger: Danger | None) -> NoReturn:
    if danger is not None:
        meaning, _, replacement = danger
        advice = f"Ask for {replacement}."
    else:
        meaning = f"not {escape(difference.expected)}, as its other keys and tensors have it"
        advice = "Fetch it again, or ask whoever made it which is right."
    raise CheckpointError(f"{escape(path)}: {difference}: {meaning}; it is not read. {advice}")


def _find_pattern(place: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the first pattern of ``names`` that matches the key at ``place``, or the empty string."""
    return next((name for name in names if fnmatchcase(f".{place}", f"*.{name}")), "")
