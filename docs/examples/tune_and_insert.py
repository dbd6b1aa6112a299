"""Tune a drafter on what its base writes, put it back into its bundle, and see that the new bundle holds it.

python docs/examples/tune_and_insert.py gemma-4-E4B-it.litertlm google/gemma-4-E4B-it --steps 500
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts


class Printed(mtp_extract.Reporter):
    """Prints what is begun."""

    def say(self, text: str) -> None:
        """Print it."""
        print(text)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("bundle", nargs="?", default=sample_bundle(), help="the bundle with the drafter")
parser.add_argument("base", nargs="?", default=str(sample_base()), help="the model that it drafts for")
parser.add_argument("--prompts", type=Path, default=sample_prompts(), help="by default the sample's")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning-rate", type=float, help="by default by the drafter's width")
parser.add_argument("--new-tokens", type=int, default=32)
options = vars(parser.parse_args())
bundle = options.pop("bundle")

made = mtp_extract.extract(bundle, "drafter", dtype="f32", overwrite=True)
# Forced, so that there is something to insert: else only what is shown to be better is written.
plan = mtp_extract.TuningPlan(made.directory, force=True, overwrite=True, **options)
tuned = mtp_extract.tune(plan, Printed())
for reason in tuned.refused:
    print(f"not shown to be better: {reason}")

written = mtp_extract.insert(tuned.directory, bundle, "tuned.litertlm", overwrite=True)
print(f"{written.path}: {written.size:,} bytes")
again = mtp_extract.extract(written.path, "drafter-again", dtype="f32", overwrite=True)
places = (made.directory, tuned.directory, again.directory)
before, wanted, found = (load_file(place / "model.safetensors") for place in places)
changed = [name for name in found if not np.array_equal(found[name], before[name])]
same = all(np.array_equal(found[name], wanted[name]) for name in wanted)
print(f"extracted again: {len(changed)} of {len(found)} tensors are others than before, all as tuned: {same}")
