"""What a tuning takes of memory, phase by phase, against the estimate that it begins with.

A base of Gemma 4 E4B's width, vocabulary and per-layer embeddings, with random weights and fewer layers, and a drafter
of E4B's whole shape, all of its matrices INT4. Every mode is a run of ``mtp-tune`` in a process of its own, whose peak
is taken anew in every phase; what the libraries take before it begins is not counted, as in the estimate. Where one is
more than a tenth off the other, the exit status is 1::

    python scripts/tune_memory.py --work DIR [--layers 5] [--modes norms,qat,float] [--shape e4b]

At the default 4 GB on the disk and 8 GB of memory. ``--shape tiny`` shows that it runs, and holds nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from mtp_extract.architecture.config import DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, MATRIX, shapes_of
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import Steps, Weight, of_array, of_codes
from mtp_extract.data import sample_base
from mtp_extract.formats import format_named
from mtp_extract.litertlm.storage import Packing
from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.staging import write_file
from mtp_extract.tune import pair
from mtp_extract.tune.memory import Estimate, estimate
from mtp_extract.tune.prompts import HELD_OUT, TRAINED, WATCHED, side_of
from mtp_extract.tune.run import TuningPlan, run_tuning
from mtp_extract.tune.setting import Setting

SLIDING, FULL = "sliding_attention", "full_attention"
MOST_OFF = 0.1
PHASES = {
    "it takes about": "loading",
    "continuing": "writing text",
    "measuring": "measuring",
    "training": "training",
}
"""What a run says when a phase begins → the phase, as the estimate calls it."""


@dataclass(frozen=True)
class Shape:
    """Of a base and its drafter."""

    vocabulary: int
    width: int
    feed_forward: int
    heads: int
    head_dims: tuple[int, int]  # of sliding and of full layers
    per_layer: int
    drafter_width: int
    drafter_feed_forward: int
    tokens: int  # of a text


SHAPES = {
    "e4b": Shape(262_144, 2560, 10_240, 8, (256, 512), 256, 256, 2048, 40),
    "tiny": Shape(512, 32, 48, 4, (8, 12), 8, 16, 24, 12),
}


def make_base(shape: Shape, layers: int, out: Path) -> None:
    """A base of ``layers`` layers, the last two of which share the K and V of others, in BF16."""
    types = [FULL if index % 3 == 2 else SLIDING for index in range(layers - 2)]
    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": layers,
        "layer_types": [*types, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 2,
        "head_dim": shape.head_dims[0],
        "global_head_dim": shape.head_dims[1],
        "sliding_window": 512,
        "hidden_size_per_layer_input": shape.per_layer,
        "vocab_size_per_layer_input": shape.vocabulary,
        "final_logit_softcapping": 30.0,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }
    config = transformers.Gemma4TextConfig(**settings)
    shutil.copytree(sample_base(), out, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_*"))
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(out)
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if tensor.ndim == 2:
            tensor.uniform_(-1, 1, generator=generator).mul_(1.0 if "embed" in name else tensor.shape[1] ** -0.5)
        tensors[name] = tensor
    buffers = {name: torch.ones(value.shape, dtype=torch.bfloat16) for name, value in model.named_buffers()}
    tensors |= {name: value for name, value in buffers.items() if name.endswith("layer_scalar")}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def make_drafter(shape: Shape, out: Path) -> None:
    """A drafter of four layers with random codes, as floats with its codes beside them."""

    def layer(kind: str) -> LayerConfig:
        full = kind == FULL
        rope = RopeConfig(1e6, partial_rotary_factor=0.25) if full else RopeConfig(1e4)
        return LayerConfig(kind, shape.head_dims[full], 2, None if full else 512, rope)

    config = DrafterConfig(
        backbone_hidden_size=shape.width,
        hidden_size=shape.drafter_width,
        intermediate_size=shape.drafter_feed_forward,
        vocab_size=shape.vocabulary,
        num_heads=4,
        layers=(layer(SLIDING), layer(SLIDING), layer(SLIDING), layer(FULL)),
        final_logit_softcap=30.0,
    )
    random = np.random.default_rng(0)
    tensors: dict[str, Weight] = {}
    for role, size in shapes_of(config).items():
        if role.kind != MATRIX:
            tensors[role.name] = of_array(np.ones(size, np.float32))
            continue
        codes = random.integers(-7, 8, size, np.int8)
        scales = np.full((size[0], 1), size[1] ** -0.5 / 4, np.float32)
        steps = Steps(size[1], scales, np.zeros(scales.shape, np.int64))

        def rows(first: int, last: int, codes: Any = codes) -> Any:
            return codes[first:last]

        def grid(steps: Steps = steps) -> Steps:
            return steps

        tensors[role.name] = of_codes(size, Packing(4, signed=True), rows, grid)
    made = Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), "f32")
    packed = out.with_name("packed")
    packed.mkdir()
    for file in format_named("compressed-tensors").plan(made, "f32"):
        write_file(packed, file)
    convert(packed, out, format="transformers", codes=True)


def make_prompts(out: Path) -> None:
    """So few that each side has just enough."""
    sources = [f"value_{number}" for number in range(400)]
    sides = {TRAINED: 4, WATCHED: 4, HELD_OUT: 5}
    chosen = [s for side, count in sides.items() for s in [s for s in sources if side_of(s) == side][:count]]
    out.write_text("".join(json.dumps({"prompt": f"{s} = ", "source": s}) + "\n" for s in chosen), encoding="utf-8")


def memory(name: str) -> int:
    """Bytes of this process, by a field of its status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def run(mode: str, work: Path, tokens: int) -> dict[str, dict[str, int]]:
    """Of a tuning in this process: what each phase took at most, and was to take, in bytes."""
    torch.set_num_threads(1)
    estimates = list[Estimate]()

    def noted(*arguments: Any) -> Estimate:
        estimates.append(estimate(*arguments))
        return estimates[0]

    before, phase, measured = 0, "", dict[str, int]()

    def say(line: str) -> None:
        nonlocal before, phase
        begun = next((name for words, name in PHASES.items() if line.startswith(words)), None)
        if begun is None:
            return
        if phase:
            measured[phase] = max(measured.get(phase, 0), memory("VmHWM") - before)
        else:
            before = memory("VmRSS")
        phase = begun
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    setting = Setting(
        directory=work / "drafter",
        base=str(work / "base"),
        work=work / "run",
        prompts=work / "prompts.jsonl",
        new_tokens=tokens,
        batch=4,
        device="cpu",
        chat_template=False,
        other_prompts=0,
    )
    # A training that is finished is not begun again.
    (work / "run" / "state.pt").unlink(missing_ok=True)
    plan = TuningPlan(setting, work / f"tuned-{mode}", mode=mode, steps=2, force=True, overwrite=True)
    with patch.object(pair, "estimate", noted):
        run_tuning(plan, say)
    measured[phase] = max(measured.get(phase, 0), memory("VmHWM") - before)
    found = {p.name: p.bytes for p in estimates[0].phases}
    return {name: {"measured": size, "estimated": found[name]} for name, size in measured.items()}


def main() -> None:
    """Make the pair, run every mode, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for base, drafter and runs; kept")
    parser.add_argument("--layers", type=int, default=5, help="of the base, at least 5")
    parser.add_argument("--modes", default="norms,qat,float")
    parser.add_argument("--shape", choices=SHAPES, default="e4b")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.run:
        print(json.dumps(run(options.run, options.work, shape.tokens)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "prompts.jsonl").exists():
        make_base(shape, options.layers, options.work / "base")
        make_drafter(shape, options.work / "drafter")
        make_prompts(options.work / "prompts.jsonl")
    off = 0.0
    print("| mode | phase | measured | estimated | off |\n| --- | --- | --- | --- | --- |")
    for mode in options.modes.split(","):
        job = [sys.executable, __file__, "--work", str(options.work), "--shape", options.shape, "--run", mode]
        ran = subprocess.run(job, check=True, stdout=subprocess.PIPE, text=True)
        for phase, sizes in json.loads(ran.stdout.splitlines()[-1]).items():
            share = sizes["estimated"] / sizes["measured"] - 1
            off = max(off, abs(share))
            print(
                f"| {mode} | {phase} | {sizes['measured'] / 1e9:.2f} GB | {sizes['estimated'] / 1e9:.2f} GB | "
                f"{share:+.0%} |",
                flush=True,
            )
    if options.shape != "tiny" and off > MOST_OFF:
        raise SystemExit(f"expected estimates within {MOST_OFF:.0%}, found one {off:.0%} off")


if __name__ == "__main__":
    main()
