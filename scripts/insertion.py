"""Put weights into a bundle and run it on Google's runtime: are its drafts accepted, and is the text the same?

    python scripts/insertion.py BUNDLE FLOATS.npz [--litert-lm PROGRAM]

BUNDLE holds a base and its drafter; FLOATS has the drafter's weights before they were quantized, by transformers name.
What is measured, each with and without speculation: the bundle as it is; its floats put in and requantized; random
matrices; the drafter taken out and added again. Needs ``pip install litert-lm==0.18.1`` in whatever environment PROGRAM
is from.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from mtp_extract.architecture.roles import roles_of
from mtp_extract.bundle import MODEL_TYPE, open_bundle
from mtp_extract.insertion.drafter import planned_insertion
from mtp_extract.io.laid import write_laid
from mtp_extract.litertlm.writer import bundle_with
from mtp_extract.pipeline.extraction import extract

PROMPT = "class Foo(object):"
WEIGHTS = "model.safetensors"

Change = Callable[[str, npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def run(program: str, bundle: Path, prompt: str, speculative: bool) -> tuple[str, float | None]:
    """The runtime's greedy text, and the share of drafts that it accepted; None where it drafted nothing."""
    how = ["--backend", "cpu", "--no-template", "--cache", "no", "--top-k", "1", "--verbose"]
    command = [
        program,
        "run",
        str(bundle),
        "--prompt",
        prompt,
        *how,
        "--speculative-decoding",
        str(speculative).lower(),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{bundle.name}: the runtime failed ({done.returncode}): {done.stderr[-400:]}")
    rate = re.search(r"Success rate: ([0-9.]+)", done.stderr + done.stdout)
    return done.stdout, float(rate.group(1)) if rate else None


def changed(checkpoint: Path, out: Path, change: Change) -> Path:
    """A copy of ``checkpoint`` with every tensor changed."""
    out.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file() and path.name != WEIGHTS:
            (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(checkpoint / WEIGHTS)
    save_file({name: change(name, tensor) for name, tensor in tensors.items()}, out / WEIGHTS)
    return out


def inserted(source: Path, bundle: Path, out: Path) -> Path:
    """``bundle`` with the drafter of ``source``."""
    with planned_insertion(source, bundle) as plan:
        plan.write(out)
    return out


def without_drafter(bundle: Path, out: Path) -> Path:
    """``bundle`` without its drafter's section."""
    with open_bundle(bundle) as opened:
        assert opened.bundle is not None
        gone = frozenset(s.index for s in opened.sections if s.model_type == MODEL_TYPE)
        write_laid(out, bundle_with(opened.bundle, {}, removed=gone))
    return out


def compared(text: str, plain: str) -> str:
    """How the text with speculation differs from the base's own; where the cache is full both end, not at one token."""
    if text == plain:
        return "the same"
    mine, own = text.rstrip(), plain.rstrip()
    agreed = next((i for i, (a, b) in enumerate(zip(mine, own, strict=False)) if a != b), min(len(mine), len(own)))
    return f"the same for {agreed} characters of {len(mine)} and {len(own)}"


def main() -> None:
    """Make the bundles, run them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("floats", type=Path)
    parser.add_argument("--litert-lm", default="litert-lm", help="the runtime's program")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, np.load(options.floats) as floats:
        work = Path(folder)
        checkpoint = work / "checkpoint"
        extract(options.bundle, checkpoint, dtype="f32")
        originals = {name: floats[name].astype(np.float32) for name in floats.files}
        random = np.random.default_rng(0)
        names = {role.names["transformers"] for role in roles_of(64)}

        def original(name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            assert name in names
            return np.asarray(originals[name].reshape(tensor.shape))

        def noise(name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            if tensor.ndim != 2:
                return tensor
            return np.asarray(random.standard_normal(tensor.shape) * tensor.std(), np.float32)

        tuned = changed(checkpoint, work / "floats", original)
        bare = without_drafter(options.bundle, work / "bare.litertlm")
        bundles = {
            "as it is": options.bundle,
            "its floats, requantized": inserted(tuned, options.bundle, work / "floats.litertlm"),
            "random matrices": inserted(
                changed(checkpoint, work / "noise", noise), options.bundle, work / "noise.litertlm"
            ),
            "taken out and added again": inserted(options.bundle, bare, work / "added.litertlm"),
        }
        plain, _ = run(options.litert_lm, bare, options.prompt, False)
        print("| bundle | bytes | drafts accepted | text with speculation |\n| --- | --- | --- | --- |")
        for what, path in bundles.items():
            text, rate = run(options.litert_lm, path, options.prompt, True)
            without, _ = run(options.litert_lm, path, options.prompt, False)
            assert without == plain, f"{what}: the base's own text changed"
            print(f"| {what} | {path.stat().st_size} | {rate:.4f} | {compared(text, plain)} |", flush=True)


if __name__ == "__main__":
    main()
