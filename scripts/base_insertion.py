"""Put a changed base into a bundle and run it on Google's runtime: is its greedy text the changed base's?

    python scripts/base_insertion.py BUNDLE BASE [--runtime PYTHON] [--tokens N]

BUNDLE holds the base in the directory BASE. Every matrix and norm of a copy of BASE is changed, and put into BUNDLE as
it is stored, and into a copy of BUNDLE whose base is stored in float32. Each is run without speculation, and beside it
transformers generates from the copy of BASE, from the runtime's own token ids: the tokenizers in the two may differ.
In integers the runtime rounds activations as well, so that texts part; in float32 they are to be the same.
PYTHON is an interpreter with ``pip install litert-lm==0.18.1``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, Gemma4ForConditionalGeneration

from mtp_extract.base.insertion import planned_base_insertion
from mtp_extract.base.places import find_base
from mtp_extract.bundle import open_bundle
from mtp_extract.io.laid import Laid, made, write_laid
from mtp_extract.litertlm.storage import CODE_TYPES, QuantizedTensor
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.litertlm.writer import bundle_with

PROMPTS = (
    "class Foo(object):",
    "import os",
    "def main():",
    "    for i in range(",
    "# Copyright",
    "if __name__ ==",
    "try:",
    "return self.",
)
WEIGHTS = "model.safetensors"
NOISE = 0.1
BOS = 2

TOKENIZE = """
import json, sys, litert_lm
engine = litert_lm.Engine(sys.argv[1])
print("TOKENS " + json.dumps([list(engine.tokenize(prompt)) for prompt in sys.argv[2:]]))
"""


def changed(base: Path, out: Path) -> Path:
    """A copy of ``base`` with every matrix and norm a little different; what is 1 stays so."""
    random = np.random.default_rng(0)
    out.mkdir()
    for path in base.iterdir():
        if path.name != WEIGHTS:
            (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.size > 1:
            scale = tensor.std() if tensor.ndim == 2 else np.abs(tensor)
            noise = NOISE * scale * random.standard_normal(tensor.shape)
            tensors[name] = (tensor + noise).astype(np.float32)
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    return out


def in_floats(bundle: Path, out: Path) -> Path:
    """``bundle`` with its base stored in float32."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.make_bundle import load, pack, set_buffer

    models: dict[int, Any] = {}
    with open_bundle(bundle) as opened:
        assert opened.bundle is not None
        for place in (place for places in find_base(opened).places.values() for place in places):
            tensor, index = place.found.tensor, place.section.index
            if tensor is None or tensor.type not in CODE_TYPES:
                continue
            region = opened.bundle.region(place.section)
            model = models.setdefault(index, load(region.read(0, region.size)))
            held = model.subgraphs[tensor.subgraph].tensors[tensor.index]
            held.type, held.quantization = TensorType.FLOAT32, None
            set_buffer(model, held, QuantizedTensor.of(place.model, tensor).dequantize().tobytes())
        data = {index: pack(model) for index, model in models.items()}
        sections = {index: Laid(len(packed), (made(0, packed),)) for index, packed in data.items()}
        write_laid(out, bundle_with(opened.bundle, sections))
    return out


def inserted(base: Path, bundle: Path, out: Path) -> Path:
    """``bundle`` with ``base`` in it."""
    with planned_base_insertion(base, bundle) as plan:
        plan.write(out)
    return out


def called(command: list[str | Path]) -> str:
    """What ``command`` prints."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{command[0]}: failed ({done.returncode}): {done.stderr[-400:]}")
    return done.stdout


def tokens_of(runtime: Path, bundle: Path) -> list[list[int]]:
    """The runtime's token ids of every prompt."""
    lines = called([runtime, "-c", TOKENIZE, bundle, *PROMPTS]).splitlines()
    found: list[list[int]] = json.loads(
        next(line for line in lines if line.startswith("TOKENS ")).removeprefix("TOKENS ")
    )
    return found


def spoken(runtime: Path, bundle: Path, prompt: str) -> str:
    """The runtime's greedy text."""
    how = ["--backend", "cpu", "--no-template", "--cache", "no", "--top-k", "1", "--speculative-decoding", "false"]
    return called([runtime.parent / "litert-lm", "run", bundle, "--prompt", prompt, *how])


def main() -> None:
    """Make the bundles, run them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("--runtime", type=Path, required=True, help="a Python with litert-lm")
    parser.add_argument("--tokens", type=int, default=120, help="how long a text transformers writes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tuned = changed(options.base, work / "base")
        floats = in_floats(options.bundle, work / "float.litertlm")
        pairs = {
            "float32, as it was": (floats, options.base),
            "float32, changed": (inserted(tuned, floats, work / "float_changed.litertlm"), tuned),
            "as stored, as it was": (options.bundle, options.base),
            "as stored, changed": (inserted(tuned, options.bundle, work / "changed.litertlm"), tuned),
        }
        ids = tokens_of(options.runtime, options.bundle)
        print(
            "| base in the bundle | bytes | texts the same | characters before they part |\n| --- | --- | --- | --- |"
        )
        for what, (bundle, base) in pairs.items():
            model: Any = Gemma4ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(base)
            alike = []
            for prompt, own in zip(PROMPTS, ids, strict=True):
                given = torch.tensor([[BOS, *own]])
                with torch.no_grad():
                    made = model.generate(given, max_new_tokens=options.tokens, do_sample=False)
                wanted = tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)
                said = spoken(options.runtime, bundle, prompt)
                common = next((i for i, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), len(wanted))
                alike.append((min(common, len(said)), len(wanted)))
            same = sum(common == length for common, length in alike)
            shown = ", ".join(f"{common}/{length}" for common, length in alike)
            print(f"| {what} | {bundle.stat().st_size} | {same} of {len(alike)} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
