"""Builds a sample ``.litertlm`` bundle from nothing, with Google's own tools.

Trains a tiny Gemma 4 base (6 layers, width 64, vocabulary 512, per-layer embeddings, 2 layers that share
caches), distils an MTP drafter half as wide on its hidden states and caches, exports both with litert-torch, names
the drafter's weights as Google's published files do, quantizes with ai-edge-quantizer (INT8; the drafter's MLPs and LM
head in INT4) and packs with litert-lm-builder::

    pip install -r scripts/requirements-sample.txt
    python scripts/build_sample.py --out sample_build
    python scripts/build_sample.py --out sample_build --base mtp_extract/data/base     # a new drafter for this base

Written to ``--out``:

- ``sample.litertlm``: metadata, tokenizer, embedders, base (prefill, decode, verify) and drafter;
- ``base/``: the trained base as a transformers checkpoint with its tokenizer, and ``prompts.jsonl``, held out;
- ``drafter/``: the trained drafter in float32, before quantization.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _sample import corpus, export, pack, shape, tasks, train
from ai_edge_litert.interpreter import Interpreter
from transformers import Gemma4ForConditionalGeneration

CORPUS_BYTES = 8_000_000
TOKENIZER_BYTES = 1_000_000
DOCUMENTS = 12_000
HELD_OUT = 10
"""One file of so many is kept for the prompts."""
PROMPTS = 16
"""Of each kind."""
FLOAT_TOLERANCE = 1e-3
"""Largest difference allowed between torch and the interpreter over float weights."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build a sample .litertlm bundle from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--steps", type=int, default=2200, help="training steps of the base (default 2200)")
    parser.add_argument("--base", type=Path, help="a base of an earlier build, instead of training one")
    parser.add_argument("--drafter-steps", type=int, default=1600, help="training steps of the drafter (default 1600)")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.steps < 1:
        parser.error("--steps must be at least 1")
    if parsed.out.exists():
        parser.error(f"{parsed.out} exists; name a folder to create")
    return parsed


def require_agreement(
    path: Path, signature: str, model: torch.nn.Module, feeds: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Raises unless Google's interpreter computes what torch computes; of inputs that the converter has not dropped."""
    interpreter = Interpreter(model_path=str(path))
    run: Any = interpreter.get_signature_runner(signature)
    worst, taken = 0.0, run.get_input_details()
    for inputs in feeds:
        with torch.no_grad():
            expected = export.convert_to_arrays(model(**inputs))
        outputs = run(**{name: value for name, value in export.convert_to_arrays(inputs).items() if name in taken})
        worst = max(worst, *(float(np.abs(outputs[name] - value).max()) for name, value in expected.items()))
    print(f"{path.name}, {signature}: interpreter and torch differ by at most {worst:.2g}", flush=True)
    if not worst <= FLOAT_TOLERANCE:
        raise RuntimeError(f"{path.name}, {signature}: expected at most {FLOAT_TOLERANCE}; the export computes else")


def write_bundle(base: Any, drafter: Any, tokens: torch.Tensor, tokenizer_json: Path, target: Path) -> None:
    """Exports, checks, quantizes and packs."""
    with tempfile.TemporaryDirectory() as folder:
        work, plain = Path(folder), export.make_exportable(base)
        feeds, step = export.make_drafter_inputs(plain, tokens, 6), export.DraftStep(export.make_exportable(drafter))
        floats = {**export.export_base(plain, work), "mtp_drafter": work / "mtp_drafter.float.tflite"}
        export.export({"mtp_drafter": (step, feeds[0])}, floats["mtp_drafter"])
        weights = {name: value for name, value in drafter.state_dict().items() if "embed_tokens" not in name}
        pack.publish(floats["mtp_drafter"], export.convert_to_arrays(weights))
        require_agreement(floats["mtp_drafter"], "mtp_drafter", step, feeds)
        decode = export.BaseStep(plain, with_logits=True)
        for signature, count in (("decode", 1), ("verify", export.VERIFY)):
            require_agreement(
                floats["prefill_decode"], signature, decode, export.make_base_inputs(plain, tokens, count)
            )
        sections = {
            kind: work / f"{kind}.tflite"
            for kind in ("embedder", "per_layer_embedder", "prefill_decode", "mtp_drafter")
        }
        for kind, path in sections.items():
            pack.quantize(floats[kind], path, pack.DRAFTER_RULES if kind == "mtp_drafter" else pack.BASE_RULES)
        pack.pack(target, work, sections, tokenizer_json, sorted(export.make_caches(base)))
    print(f"{target}: {target.stat().st_size} bytes", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains both, and packs them."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)  # the tensors are too small to share
    draw = random.Random(options.seed)
    texts = [path.read_text("utf-8", "replace") for path in corpus.list_standard_library_files(CORPUS_BYTES)]
    texts = [text for text in texts if text.strip()]
    held_out, seen = texts[::HELD_OUT], [text for index, text in enumerate(texts) if index % HELD_OUT]
    tokenizer = corpus.train_tokenizer(corpus.mix_texts(seen, TOKENIZER_BYTES, draw), shape.VOCAB)
    documents = corpus.draw_documents(tokenizer, seen, DOCUMENTS, train.LENGTH, draw)
    drills = [corpus.draw_drill(tokenizer, draw) for _ in range(DOCUMENTS // 4)]
    tokens = torch.tensor([token for document in documents[:200] for token in document.ids])
    print(f"corpus: {len(texts)} files, {sum(len(document.ids) for document in documents)} tokens", flush=True)

    options.out.mkdir(parents=True)
    if options.base:
        base = Gemma4ForConditionalGeneration.from_pretrained(options.base, dtype=torch.float32)
    else:
        base = train.train_base(drills, documents, options.steps, options.seed)
    base.generation_config.eos_token_id = [corpus.EOS, corpus.TURN_END]
    base.save_pretrained(options.out / "base")
    tokenizer.save_pretrained(options.out / "base")
    prompts = tasks.draw_prompts(draw, [text.splitlines() for text in held_out], PROMPTS)
    rows = [{"prompt": text, "workload": name} for name, texts in prompts.items() for text in texts]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (options.out / "base" / "prompts.jsonl").write_text(lines, encoding="utf-8")
    drafter = train.train_drafter(base, documents, options.drafter_steps, options.seed)
    drafter.save_pretrained(options.out / "drafter")
    write_bundle(base, drafter, tokens, options.out / "base" / "tokenizer.json", options.out / "sample.litertlm")


if __name__ == "__main__":
    main()
