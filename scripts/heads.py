"""Run an EAGLE-3 head in every engine that is installed, in both layouts, and print one table.

    python scripts/heads.py HEAD BASE
    python scripts/heads.py HEAD BASE --python mlx-vlm=VENV/bin/python --llama BUILD/bin --llama-source llama.cpp

For each engine and layout: does it load, is the greedy text the base's own, and how many drafts are accepted; in vLLM,
whose loader and module run without a GPU, how far its logits are from ours. Exits with 1 if one does not load, changes
the text, or computes otherwise. Interpreters and programs as for ``engines.py``; llama.cpp's converter wants
sentencepiece too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _engines import llama_cpp
from _engines.outcome import COLUMNS, Outcome, cells, from_json, last_line, run
from engines import LLAMA_TOKENS, PROMPT, TOKENS
from safetensors.torch import load_file, save_file

from mtp_extract.cli.terminal import say, table
from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import load_any
from mtp_extract.drafter.protocol import BaseState, Fed
from mtp_extract.evaluate.base_model import load_base
from mtp_extract.pipeline.conversion import convert
from mtp_extract.report.markdown import plain
from mtp_extract.report.markdown import table as markdown_table
from mtp_extract.speculate.generate import SpeculativeGenerator

SCRIPTS = Path(__file__).resolve().parent / "_engines"
LAYOUTS = ("eagle3", "speculators")
POSITIONS = 20
ALLOWED = 1e-5
"""Of the largest logit, between vLLM's module and ours; what is further apart did not load what is there."""
EMBEDDING = "embed_tokens.weight"


def ask(head: Eagle3Drafter, path: Path) -> None:
    """Random tokens, embeddings and states at :data:`POSITIONS` positions; states differ in size, as Gemma's do."""
    config, generator = head.config, np.random.default_rng(0)
    states = generator.normal(size=(POSITIONS, 3, config.backbone_hidden_size)) * np.array([0.3, 3, 30])[:, None]
    np.savez(
        path,
        table=generator.normal(size=(config.vocab_size, config.hidden_size)).astype(np.float32),
        tokens=generator.integers(0, config.vocab_size, POSITIONS),
        states=states.reshape(POSITIONS, -1).astype(np.float32),
    )


@torch.inference_mode()
def difference(head: Eagle3Drafter, asked: Path, answered: Path) -> float:
    """The largest between the answers and ours, as a share of the largest number of each kind."""
    table, tokens, states = (torch.from_numpy(np.load(asked)[name]) for name in ("table", "tokens", "states"))
    read = dict(zip(head.config.base_layers, states[None].chunk(3, dim=-1), strict=True))
    positions = torch.arange(len(tokens))[None]
    fed = Fed(torch.cat((tokens[:1], tokens[:-1]))[None], positions, torch.empty(1, len(tokens), 0), read)
    scale = head.config.backbone_hidden_size**0.5
    known = BaseState(positions + 1, torch.empty(0), lambda chosen: table[chosen] * scale, {}, {}, fed)
    logits, state = head.step(head.start(known), tokens[None])
    found = 0.0
    for name, ours in (("logits", logits[0]), ("fed_back", state.hidden[0])):
        theirs = torch.from_numpy(np.load(answered)[name])
        there = theirs.isfinite()
        if not torch.equal(there, ours.isfinite()):
            raise ValueError("vLLM proposes other tokens")
        found = max(found, float((ours - theirs)[there].abs().max() / theirs[there].abs().max()))
    return found


def own(head: Eagle3Drafter, base: Path) -> Iterator[Outcome]:
    """Our loop, with as many drafts a round as the others are asked for."""
    loaded = load_base(str(base), "cpu")
    generator = SpeculativeGenerator(loaded.model, head, loaded.tokenizer)
    expected = generator.generate(PROMPT, max_new_tokens=TOKENS, drafts=0).tokens
    for drafts in (3, 1):
        found = generator.generate(PROMPT, max_new_tokens=TOKENS, drafts=drafts)
        same, note = found.tokens == expected, f"{drafts} drafts a round" if drafts > 1 else "one draft a round"
        yield Outcome("mtp-extract", "", "", True, same, found.drafted, found.accepted, note)


def in_vllm(python: str, head: Eagle3Drafter, base: Path, directory: Path, folder: Path) -> Outcome:
    """Loaded, and asked."""
    asked, answered = folder / "asked.npz", folder / "answered.npz"
    ask(head, asked)
    done = run([python, str(SCRIPTS / "load_vllm.py"), *map(str, (base, directory, asked, answered))])
    if done.returncode:
        return Outcome("vllm", "", loads=False, note=last_line(done.stderr))
    found, apart = from_json("vllm", "", done.stdout), difference(head, asked, answered)
    return replace(found, loads=apart <= ALLOWED, note=f"{found.note}; {apart:.1e} from ours, of the largest logit")


def in_mlx(python: str, base: Path, directory: Path, folder: Path) -> Outcome:
    """With the base's embeddings in its file, which mlx-vlm asks for and then replaces, and one draft a round.

    With more, mlx-vlm 0.7.10 changes the text once the sliding window is full: what a rejected draft overwrote in a
    rotating cache is gone. Its loop for MTP drafters has a buffer for that.
    """
    made = shutil.copytree(directory, folder / "mlx")
    weights = load_file(made / "model.safetensors")
    (name,) = (name for name in load_file(base / "model.safetensors") if name.endswith(f"language_model.{EMBEDDING}"))
    weights.setdefault(EMBEDDING, load_file(base / "model.safetensors")[name].to(weights["fc.weight"].dtype))
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    done = run([python, str(SCRIPTS / "run_mlx_vlm.py"), str(base), str(made), PROMPT, str(TOKENS), "2"])
    if done.returncode:
        return Outcome("mlx-vlm", "", loads=False, note=last_line(done.stderr))
    return replace(from_json("mlx-vlm", "", done.stdout), note="one draft a round, the base's embeddings in the file")


def in_llama(options: argparse.Namespace, python: str, directory: Path, folder: Path) -> list[Outcome]:
    """Through its converter."""
    base, made = folder / "base.gguf", folder / "head.gguf"
    llama = llama_cpp.Llama(options.llama, base, PROMPT, LLAMA_TOKENS, "draft-eagle3")
    try:
        llama.convert(options.llama_source, options.base, base, python)
        llama.convert(options.llama_source, directory, made, python, "--target-model-dir", str(options.base))
    except RuntimeError as error:
        return [Outcome("llama.cpp", "", loads=False, note=str(error))]
    return llama.check(made, "")


def outcomes_of(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """The rows, engine by engine."""
    head = load_any(options.head, dtype=torch.float32)
    if not isinstance(head, Eagle3Drafter):
        raise SystemExit(f"{options.head}: expected an EAGLE-3 head, found an MTP drafter")
    yield from own(head, options.base)
    for layout in LAYOUTS:
        directory, work = folder / layout, folder / f"{layout}.work"
        convert(options.head, directory, format=layout, dtype="f32")
        work.mkdir()
        found: list[Outcome] = []
        if python := options.python.get("vllm"):
            found.append(in_vllm(python, head, options.base, directory, work))
        if (python := options.python.get("mlx-vlm")) and layout == "speculators":
            found.append(in_mlx(python, options.base, directory, work))
        if options.llama and options.llama_source:
            found += in_llama(options, options.python.get("llama.cpp", sys.executable), directory, work)
        yield from (replace(outcome, format=layout) for outcome in found)


def main() -> None:
    """Run what is there, print the table, and say what fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="an EAGLE-3 head, in either layout")
    parser.add_argument("base", type=Path, help="its base, a transformers checkpoint")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="where llama-server is, and llama-speculative-simple")
    parser.add_argument("--llama-source", type=Path, metavar="DIR", help="llama.cpp's source tree, with its converter")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args()
    options.python = dict(pair.partition("=")[::2] for pair in options.python)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(outcomes_of(options, Path(folder)))
    rows = [cells(outcome) for outcome in outcomes]
    table(rows, COLUMNS, indent="", longest=120)
    if options.markdown:
        options.markdown.write_text(markdown_table(COLUMNS, [[plain(cell) for cell in row] for row in rows]) + "\n")
    wrong = [outcome for outcome in outcomes if outcome.loads is False or outcome.identical is False]
    for outcome in wrong:
        say(f"{outcome.engine}, {outcome.format}: {outcome.note or 'another text'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
