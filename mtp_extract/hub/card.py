"""The model card of an extracted drafter: ``README.md`` with the Hub's metadata.

A card is a function of ``extraction.json`` and, where there is one, ``report.json``: no dates, no network,
the same bytes for the same input. Names come from files nobody vouches for, so they are escaped for Markdown
and for YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.litertlm.published import base_model_of, bundle_of, license_of

__all__ = ["card_metadata", "model_card"]

_TAGS = (
    "speculative-decoding",
    "multi-token-prediction",
    "mtp",
    "draft-model",
    "gemma4",
    "litert-lm",
    "mtp-extract",
)

_DIRECTORY = "DRAFTER"
_BASE = "BASE_MODEL"

# Commands that start each engine with a drafter in the transformers layout. {base} and {drafter} are filled
# in.
_ENGINES: tuple[tuple[str, str, str], ...] = (
    (
        "transformers",
        "python",
        """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = AutoModelForCausalLM.from_pretrained("{base}", dtype="bfloat16", device_map="auto")
drafter = AutoModelForCausalLM.from_pretrained("{drafter}", dtype="bfloat16", device_map="auto")
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Name three rivers."}}],
    add_generation_prompt=True, return_dict=True, return_tensors="pt",
).to(model.device)
output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
    ),
    (
        "vLLM",
        "sh",
        """\
vllm serve {base} \\
  --speculative-config '{{"method":"mtp","model":"{drafter}","num_speculative_tokens":4}}'""",
    ),
    (
        "SGLang",
        "sh",
        """\
python -m sglang.launch_server --model-path {base} \\
  --speculative-algorithm NEXTN --speculative-draft-model-path {drafter} \\
  --speculative-num-steps 5 --speculative-num-draft-tokens 6 --speculative-eagle-topk 1""",
    ),
    (
        "llama.cpp",
        "sh",
        """\
python convert_hf_to_gguf.py {drafter} --outfile drafter.gguf   # DRAFTER as a local directory
llama-server -m target.gguf -md drafter.gguf --spec-type draft-mtp --spec-draft-n-max 4""",
    ),
    (
        "mlx-vlm",
        "sh",
        """\
python -m mlx_vlm.generate --model {base} --prompt "Name three rivers." \\
  --draft-model {drafter} --draft-kind mtp --draft-block-size 4""",
    ),
)


def card_metadata(extraction: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The card's YAML header as a dict, in the order in which it is written."""
    metadata: dict[str, str | list[str]] = {"license": license_of(extraction)[0]}
    base = base_model_of(extraction)
    if base:
        metadata["base_model"] = [base]
    if extraction["layout"] == "transformers":
        metadata["library_name"] = "transformers"
    metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = list(_TAGS)
    return metadata


def model_card(extraction: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    """The text of ``README.md`` for a checkpoint directory.

    Args:
        extraction: the content of ``extraction.json``.
        report: the content of the ``report.json`` that ``mtp-validate`` wrote, or None.
    """
    parts = [
        _yaml(card_metadata(extraction)),
        _introduction(extraction),
        _provenance(extraction),
        _use(extraction),
        _geometry(extraction),
        _tensors(extraction),
        _validation(report),
        _limits(extraction),
        _license(extraction),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _yaml(metadata: Mapping[str, str | list[str]]) -> str:
    # JSON strings are YAML strings: quoting everything leaves nothing for a hostile name to break out of.
    lines = ["---"]
    for key, value in metadata.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(item)}" for item in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, "---"])


def _code(value: object) -> str:
    """``value`` as inline code that cannot end itself, a table cell or a line."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    text = escape(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _title(extraction: Mapping[str, Any]) -> str:
    known = extraction.get("known_as")
    return escape(known) if known else "MTP drafter"


def _introduction(extraction: Mapping[str, Any]) -> str:
    source = extraction["source"]
    tool = extraction["tool"]
    base = base_model_of(extraction)
    target = f"[{escape(base)}](https://huggingface.co/{escape(base)})" if base else "its base model"
    name = _title(extraction)
    heading = f"# {name}: multi-token prediction drafter" if extraction.get("known_as") else "# MTP drafter"
    return (
        f"{heading}\n\n"
        f"The multi-token prediction (MTP) drafter of {target}, extracted from {_code(source['name'])} with "
        f"mtp-extract {escape(tool['version'])}. It proposes several tokens that the base model then "
        "verifies in one pass: speculative decoding. It is of no use without that base model, whose "
        "embeddings, hidden states and key/value cache it reads."
    )


def _provenance(extraction: Mapping[str, Any]) -> str:
    source, section = extraction["source"], extraction["source"].get("section") or {}
    provenance = source.get("provenance") or {}
    bundle = bundle_of(extraction)
    rows = [("file", _code(source["name"])), ("size", f"{int(source['size']):,} bytes")]
    if source.get("kind"):
        version = source.get("version")
        rows.append(("format", _code(f"{source['kind']} {_version(version)}".strip())))
    if bundle is not None:
        same_file = bundle.size == source["size"]
        rows.append(("known as", f"{bundle.name}" + (f" ({bundle.note})" if same_file and bundle.note else "")))
    rows += [(key.replace("_", " "), _code(value)) for key, value in provenance.items()]
    if section:
        rows.append(("section", f"{section.get('index', '–')} ({_code(section.get('model_type') or 'mtp_drafter')})"))
        if "begin" in section:
            rows.append(("bytes of the section", f"{int(section['begin']):,} to {int(section['end']):,}"))
        rows.append(("SHA-256 of the section", _code(section.get("sha256", ""))))
        if section.get("found_by"):
            rows.append(("found by", _code(section["found_by"])))
    return (
        "## Where it comes from\n\n"
        + _table(("", ""), rows)
        + "\n\n`extraction.json` records for every tensor the stored bytes it came from, their SHA-256, "
        "their quantization and the role the graph gives it. To check this copy against the bundle, bit "
        f"for bit:\n\n```sh\nmtp-inspect {_DIRECTORY} --against {_source_argument(extraction)}\n```"
    )


def _version(version: object) -> str:
    if isinstance(version, (list, tuple)):
        return ".".join(str(part) for part in version)
    return str(version) if version else ""


def _source_argument(extraction: Mapping[str, Any]) -> str:
    """How to name the bundle on a command line, as exactly as the record allows."""
    provenance = extraction["source"].get("provenance") or {}
    if provenance.get("repository") and provenance.get("path"):
        revision = provenance.get("commit") or provenance.get("revision")
        at = f"@{revision}" if revision else ""
        return _word(f"hf://{provenance['repository']}/{provenance['path']}{at}")
    if provenance.get("url"):
        return _word(provenance["url"])
    bundle = bundle_of(extraction)
    return f"hf://{bundle.repository}/{bundle.file}" if bundle else "BUNDLE.litertlm"


def _word(text: object) -> str:
    """``text`` as one shell word within a fenced block."""
    word = escape(text).replace("`", "")
    plain = all(c.isalnum() or c in "/:@._-+%=," for c in word)
    return word if plain else "'" + word.replace("'", "'\\''") + "'"


def _use(extraction: Mapping[str, Any]) -> str:
    base = base_model_of(extraction) or _BASE
    missing = f"`{_BASE}` the model it was trained for, " if base == _BASE else ""
    if extraction["layout"] != "transformers":
        return (
            "## How to use it\n\nThis is the LiteRT layout: tensors in F32, named by role, with "
            "`mtp_drafter_config.json`. `mtp-validate` and the Python API of mtp-extract read it; engines "
            "read the transformers layout, which the same bundle gives:\n\n"
            f"```sh\nmtp-extract {_source_argument(extraction)} --format transformers\n```"
        )
    blocks = [
        f"**{name}**\n\n```{language}\n{text.format(base=_word(base), drafter=_DIRECTORY)}\n```"
        for name, language, text in _ENGINES
    ]
    return (
        f"## How to use it\n\n`{_DIRECTORY}` is this directory or its id on the Hub; {missing}run in "
        "BF16: in FP16 the "
        "unscaled attention overflows.\n\n" + "\n\n".join(blocks)
    )


def _geometry(extraction: Mapping[str, Any]) -> str:
    rows = [(_code(key), _code(value)) for key, value in extraction["geometry"].items()]
    return "## Geometry\n\nRead from the graph, not assumed.\n\n" + _table(("", ""), rows)


def _tensors(extraction: Mapping[str, Any]) -> str:
    tensors: Mapping[str, Mapping[str, Any]] = extraction["tensors"]
    rows = [
        (_code(name), _code(entry.get("role", "")), _code(_stored(entry)), _code(_quantization(entry)))
        for name, entry in tensors.items()
    ]
    aside = extraction.get("set_aside") or []
    others = f" {len(aside)} other constants of the graph are not weights; each is listed there with the reason."
    return (
        f"## Tensors and quantization\n\n{len(rows)} tensors, written as "
        f"{escape(extraction['dtype']).upper()}: `(code − zero point) · scale`, computed once in F32. The table says "
        f"what the bundle stores; `extraction.json` has the details.{others if aside else ''}"
        "\n\n<details><summary>all tensors</summary>\n\n"
        + _table(("tensor", "role", "stored as", "quantization"), rows)
        + "\n\n</details>"
    )


def _stored(entry: Mapping[str, Any]) -> str:
    source = entry.get("source") or {}
    dtype, shape = source.get("dtype"), source.get("shape")
    if dtype is None:
        return "not in the graph"
    return f"{dtype} {list(shape)}" if shape is not None else str(dtype)


def _quantization(entry: Mapping[str, Any]) -> str:
    quantization = entry.get("quantization") or {}
    kind = quantization.get("kind") or quantization.get("scheme")
    axis, block = quantization.get("axis"), quantization.get("block_size") or quantization.get("block")
    if not quantization:
        return "none"
    words = [str(kind)] if kind else []
    words += [f"axis {axis}"] if axis is not None else []
    words += [f"blocks of {block}"] if block else []
    return ", ".join(words) or "per tensor"


def _validation(report: Mapping[str, Any] | None) -> str:
    if not report:
        return (
            "## Validation\n\nNo figures were recorded with this copy. To measure it against the base "
            f"model:\n\n```sh\nmtp-validate {_DIRECTORY} --base BASE_MODEL --report REPORT\n```"
        )
    parts = ["## Validation"]
    if report.get("verdict"):
        verdict = report["verdict"]
        parts.append(escape(verdict if isinstance(verdict, str) else json.dumps(verdict, sort_keys=True)))
    parts += _parity(report.get("parity") or {})
    parts += _agreement(report.get("agreement") or {}, report.get("controls") or {})
    parts += _generation(report.get("generation") or {})
    return "\n\n".join(parts)


def _parity(parity: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            escape(name),
            _figure(one.get("max_abs")),
            _figure(one.get("cosine"), 6),
            _percent(one.get("top1")),
            _figure(one.get("n"), 0),
        )
        for name, one in parity.items()
        if isinstance(one, Mapping) and "cosine" in one
    ]
    if rows:
        yield "Parity with the LiteRT interpreter on the same inputs (`emulated` repeats its activation "
        "quantization):"
        yield _table(("reference", "max. abs. error of logits", "cosine", "same top-1", "n"), rows)


def _agreement(agreement: Mapping[str, Any], controls: Mapping[str, Any]) -> Iterator[str]:
    steps = agreement.get("steps") or []
    if steps:
        yield "Agreement with the base model, teacher-forced over its own greedy continuation, by draft step:"
        head = (
            "step",
            "top-1",
            "top-5",
            "conditional acceptance",
            "unconditional acceptance",
            "n",
            "95 % interval",
        )
        yield _table(
            head,
            (
                (
                    str(number),
                    _percent(step.get("top1")),
                    _percent(step.get("top5")),
                    _percent(step.get("conditional")),
                    _percent(step.get("unconditional")),
                    _figure(step.get("n"), 0),
                    _interval(step.get("ci95")),
                )
                for number, step in enumerate(steps, 1)
            ),
        )
    rows = [
        (_code(name), _percent(first.get("top1")))
        for name, control in controls.items()
        for first in (control.get("steps") or [])[:1]
    ]
    if rows:
        yield "The same with something broken on purpose; a sound drafter scores clearly above each of these:"
        yield _table(("control", "top-1, step 1"), rows)


def _generation(generation: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            escape(drafts),
            _percent(one.get("acceptance")),
            _figure(one.get("mean_accepted_length"), 2),
            "yes" if one.get("identical") else "**no**",
            _figure(one.get("base_tokens_per_s"), 1),
            _figure(one.get("speculative_tokens_per_s"), 1),
        )
        for drafts, one in generation.items()
        if isinstance(one, Mapping)
    ]
    if rows:
        yield "Speculative decoding, greedy (mean accepted length = 1 + accepted / rounds):"
        yield _table(
            (
                "drafts a round",
                "acceptance",
                "mean accepted length",
                "text as without",
                "base tokens/s",
                "tokens/s",
            ),
            rows,
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _figure(value: object, digits: int | None = None) -> str:
    number = _number(value)
    if number is None:
        return "–"
    return f"{number:.3g}" if digits is None else f"{number:,.{digits}f}"


def _percent(value: object) -> str:
    number = _number(value)
    return "–" if number is None else f"{100 * number:.1f} %"


def _interval(value: object) -> str:
    """``[low, high]``, or one such pair a figure, as fractions."""
    if isinstance(value, Mapping):
        return "; ".join(f"{escape(key)} {_interval(pair)}" for key, pair in value.items())
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return f"{_percent(value[0])} to {_percent(value[1])}"
    return "–"


def _limits(extraction: Mapping[str, Any]) -> str:
    quantized = any(entry.get("quantization") for entry in extraction["tensors"].values())
    lines = [
        "It works with its own base model only: vocabulary, width and the key/value layers that it shares "
        "must be that model's. A base quantized otherwise than the one it was trained against lowers "
        "acceptance, not correctness: the base verifies every token.",
    ]
    if quantized:
        lines.append(
            "The bundle holds integers; what was lost when they were made is not in them, and this copy "
            "does not bring it back."
        )
    if _static(extraction):
        lines.append(
            "The bundle's graph also quantizes activations or the key/value cache; engines that load this copy "
            "compute in floating point, so logits differ slightly from LiteRT's. The scales are in `extraction.json`."
        )
    lines.append("The LM head is dense: the bundle has no centroids for a reduced vocabulary.")
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _static(extraction: Mapping[str, Any]) -> bool:
    """Whether the graph quantizes activations or the key/value cache with scales of its own."""
    caches = (extraction.get("kv_inputs") or {}).values()
    activations = (entry.get("activations") or {} for entry in extraction["tensors"].values())
    return any(cache.get("scale") for cache in caches) or any(one.get("input") for one in activations)


def _license(extraction: Mapping[str, Any]) -> str:
    _, name, url = license_of(extraction)
    terms = f"[{name}]({url})"
    if extraction.get("known_as") is None and bundle_of(extraction) is None:
        return (
            f"## Licence\n\nThe bundle is not a published one that mtp-extract knows. The metadata states the {terms}, "
            "those of the Gemma family; if whoever made the bundle states other terms, those hold, and the "
            "metadata has to be changed before this copy is passed on."
        )
    return (
        f"## Licence\n\nThe weights are Google's and are subject to the {terms}, the prohibited-use policy included; "
        "extraction changes the format, not the terms. Whoever published the bundle states its licence beside it: "
        "where that statement differs, it holds."
    )
