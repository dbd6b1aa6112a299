"""Builds a sample ``.litertlm`` bundle from nothing, with Google's own tools.

Trains a tiny Gemma 4 base (6 layers, width 64, vocabulary 512, per-layer embeddings, 2 layers that share
caches), distils an MTP drafter half as wide on its hidden states and caches, exports both with litert-torch, names
the drafter's weights as Google's published files do (``_sample/names.py``), quantizes with ai-edge-quantizer and packs
with litert-lm-builder::

    pip install -r scripts/requirements-sample.txt
    python scripts/build_sample.py --out sample_build
    python scripts/build_sample.py --out sample_build --base mtp_extract/data/base     # a new drafter for this base

Written to ``--out``:

- ``sample.litertlm``: metadata, tokenizer, embedders, base (prefill, decode, verify) and drafter;
- ``base/``: the trained base as a transformers checkpoint with its tokenizer, and ``prompts.json``, held out;
- ``drafter/``: the trained drafter in float32, before quantization;
- ``weights.npz``: what the quantizer computed: integers, scale, zero point, block and factor of every matrix;
- ``vectors.npz``: norms and layer scalars by transformers name;
- ``io.npz``: drafter inputs, and what Google's interpreter and torch over dequantized weights make of them.

The text is tasks in the chat format (``_sample/tasks.py``), and source of the Python standard library. A base this
small that has seen source alone writes loops: any drafter follows those, whatever it reads, so nothing can be measured
with it. A task's answer is determined by its question, never repeats itself, and needs what a drafter's attention is
for: copying, keys farther away than the sliding window, nesting, an exact position.

Before anything is packed, Google's interpreter runs the float drafter and the float base, and must agree with
torch. Trained weights depend on the seed and the machine; the exports are not reproducible byte for byte.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _sample import base as base_sections
from _sample import bundle, corpus, names, quantize, samples, tasks, train
from _sample import drafter as drafter_section
from _sample.drafter import DrafterGeometry, MtpDrafterModel
from _sample.samples import Inputs, as_arrays, run_torch
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray
from transformers import Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration

CACHE_LENGTH = 256
PREFILL_LENGTHS = (32,)
VERIFY_LENGTH = train.DRAFT_STEPS + 1
CORPUS_BYTES = 8_000_000
TOKENIZER_BYTES = 1_000_000
DOCUMENTS = 12_000
HELD_OUT = 10
"""One file of so many is kept for the prompts."""
PROMPTS = 16
"""Of each kind."""
FLOAT_TOLERANCE = 1e-3
"""Largest difference allowed between torch and the interpreter over float weights."""

BASE_RULES = (
    quantize.Rule(8),
    quantize.Rule(8, operation="EMBEDDING_LOOKUP"),
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build a sample .litertlm bundle from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--steps", type=int, default=2200, help="training steps of the base (default 2200)")
    parser.add_argument("--base", type=Path, help="a base of an earlier build, instead of training one")
    parser.add_argument("--drafter-steps", type=int, default=1600, help="training steps of the drafter (default 1600)")
    parser.add_argument(
        "--recipe", choices=sorted(quantize.RECIPES), default="mix48", help="the drafter's quantization"
    )
    parser.add_argument("--fold-softcap", action="store_true", help="let the converter fold 1/30 into the LM head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default 1: the tensors are too small to share)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.steps < 1:
        parser.error("--steps must be at least 1")
    if parsed.out.exists():
        parser.error(f"{parsed.out} exists; name a folder to create")
    return parsed


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes ``arrays`` as a compressed ``.npz`` file."""
    np.savez_compressed(path, **dict(arrays))


class Runner:
    """A signature of a TFLite model in Google's interpreter."""

    def __init__(self, path: Path, signature: str) -> None:
        """Loads the model at ``path``."""
        self._interpreter = Interpreter(model_path=str(path))
        self._run = self._interpreter.get_signature_runner(signature)
        self._details = self._run.get_input_details()

    def __call__(self, inputs: Inputs) -> Inputs:
        """Runs it. Inputs that the converter dropped as unused are left out."""
        outputs: Inputs = self._run(**{name: value for name, value in inputs.items() if name in self._details})
        return outputs


def largest_difference(left: Inputs, right: Inputs) -> float:
    """The largest absolute difference over all outputs of ``right``."""
    return max(float(np.abs(left[name] - right[name]).max()) for name in right)


def require_agreement(what: str, path: Path, signature: str, model: torch.nn.Module, feeds: list[Inputs]) -> None:
    """Raises unless the interpreter computes what torch computes."""
    runner = Runner(path, signature)
    worst = max(largest_difference(runner(sample), run_torch(model, sample)) for sample in feeds)
    print(f"{what}: interpreter and torch differ by at most {worst:.2g} over {len(feeds)} inputs", flush=True)
    if not worst <= FLOAT_TOLERANCE:
        raise RuntimeError(
            f"{what}: expected the interpreter within {FLOAT_TOLERANCE} of torch, found {worst};"
            " the export computes something else"
        )


def build_drafter(
    trained: Gemma4AssistantForCausalLM,
    geometry: DrafterGeometry,
    feeds: list[Inputs],
    work: Path,
    out: Path,
    recipe: str,
    fold_softcap: bool,
) -> Path:
    """Exports, checks and quantizes the drafter, and writes its truth; returns the section's path."""
    weights = {name: tensor.detach() for name, tensor in trained.state_dict().items()}
    model = MtpDrafterModel(drafter_section.exportable(geometry, weights), geometry, fold_softcap=fold_softcap)
    source, target = work / "mtp_drafter.float.tflite", work / "mtp_drafter.tflite"
    drafter_section.export_float(model, drafter_section.sample_inputs(geometry, CACHE_LENGTH), "mtp_drafter", source)
    arrays = as_arrays(weights)
    matrices = {name: value for name, value in arrays.items() if name != "model.embed_tokens.weight"}
    names.publish(source, matrices, geometry.softcap)
    require_agreement("float drafter", source, "mtp_drafter", model, feeds)
    parameters = quantize.quantize(source, target, quantize.RECIPES[recipe], calibration=feeds)

    truth = quantize.truth(source, parameters, matrices, geometry.softcap)
    save(out / "weights.npz", truth)
    save(out / "vectors.npz", {name: value for name, value in arrays.items() if value.ndim == 1})
    write_io(out / "io.npz", target, geometry, weights, truth, feeds)
    return target


def write_io(
    path: Path,
    section: Path,
    geometry: DrafterGeometry,
    weights: Mapping[str, torch.Tensor],
    truth: Mapping[str, NDArray[Any]],
    feeds: list[Inputs],
) -> None:
    """Runs the quantized section beside torch over the dequantized weights, and prints how close they are."""
    if any(int(value) for name, value in truth.items() if name.endswith("/hadamard")):
        print("quantized drafter: rotated weights have no float twin; no io.npz", flush=True)
        return
    restored = dict(weights)
    for name in {key.rsplit("/", 1)[0] for key in truth}:
        restored[name] = torch.from_numpy(quantize.dequantize(truth, name))
    restored["model.embed_tokens.weight"] = restored["lm_head.weight"]
    model = MtpDrafterModel(drafter_section.exportable(geometry, restored), geometry)
    runner = Runner(section, "mtp_drafter")
    record: Inputs = {}
    cosines: list[float] = []
    for index, sample in enumerate(feeds):
        measured, expected = runner(sample), run_torch(model, sample)
        record |= {f"{index}/in/{name}": value for name, value in sample.items()}
        record |= {f"{index}/litert/{name}": value for name, value in measured.items()}
        record |= {f"{index}/torch_dequant/{name}": value for name, value in expected.items()}
        for name, value in expected.items():
            left, right = measured[name].ravel(), value.ravel()
            cosines.append(float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right))))
    save(path, record)
    print(f"quantized drafter: cosine to torch {min(cosines):.4f} to {max(cosines):.4f}", flush=True)


def build_base(trained: Gemma4ForConditionalGeneration, tokens: torch.Tensor, work: Path) -> dict[str, Path]:
    """Exports, checks and quantizes the base's sections."""
    floats = base_sections.export_base(trained, work, CACHE_LENGTH, PREFILL_LENGTHS, VERIFY_LENGTH)
    model = base_sections.exportable(trained)
    step = base_sections.BaseStep(model, with_logits=True)
    for signature, count in (("decode", 1), ("verify", VERIFY_LENGTH)):
        feeds = samples.base_samples(model, tokens, count, CACHE_LENGTH)
        require_agreement(f"float base, {signature}", floats["prefill_decode"], signature, step, feeds)
    sections = {}
    for kind in ("embedder", "per_layer_embedder", "prefill_decode"):
        sections[kind] = work / f"{kind}.tflite"
        quantize.quantize(floats[kind], sections[kind], BASE_RULES)
    return sections


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, exports, quantizes and packs."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    geometry = DrafterGeometry()

    draw = random.Random(options.seed)
    texts = [path.read_text("utf-8", "replace") for path in corpus.standard_library_files(CORPUS_BYTES)]
    texts = [text for text in texts if text.strip()]
    held_out, seen = texts[::HELD_OUT], [text for index, text in enumerate(texts) if index % HELD_OUT]
    tokenizer = corpus.train_tokenizer(corpus.mixture(seen, TOKENIZER_BYTES, draw), geometry.vocab_size)
    schedule = train.Schedule(options.steps, options.drafter_steps)
    documents = corpus.documents(tokenizer, seen, DOCUMENTS, schedule.length, draw)
    drills = [corpus.drill(tokenizer, draw) for _ in range(DOCUMENTS // 4)]
    tokens = torch.tensor([token for document in documents[:200] for token in document.ids])
    print(f"corpus: {len(texts)} files, {sum(len(document.ids) for document in documents)} tokens", flush=True)

    options.out.mkdir(parents=True)
    if options.base:
        base = Gemma4ForConditionalGeneration.from_pretrained(options.base, dtype=torch.float32)
    else:
        base = train.train_base(geometry, drills, documents, schedule, options.seed)
    base.generation_config.eos_token_id = [corpus.EOS, corpus.TURN_END]
    base.save_pretrained(options.out / "base")
    tokenizer.save_pretrained(options.out / "base")
    prompts = tasks.prompts(draw, [text.splitlines() for text in held_out], PROMPTS)
    (options.out / "base" / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n", encoding="utf-8")
    drafter = train.train_drafter(geometry, base, documents, schedule, options.seed)
    drafter.save_pretrained(options.out / "drafter")

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        plain = base_sections.exportable(base)
        feeds = samples.drafter_samples(plain, geometry, tokens, 6, CACHE_LENGTH)
        section = build_drafter(drafter, geometry, feeds, work, options.out, options.recipe, options.fold_softcap)
        sections = {**build_base(base, tokens, work), "mtp_drafter": section}
        target = options.out / "sample.litertlm"
        caches = sorted(base_sections.cache_shapes(base, CACHE_LENGTH))
        bundle.pack(target, work, sections, options.out / "base" / "tokenizer.json", caches, CACHE_LENGTH)
    print(f"{target}: {target.stat().st_size} bytes, drafter {options.recipe}", flush=True)


if __name__ == "__main__":
    main()
