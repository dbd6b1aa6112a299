"""Validate a drafter against its bundle and beside its base, and read the verdict and the figures from the report.

python docs/examples/validate_pair.py litert-community/gemma-4-E4B-it-litert-lm google/gemma-4-E4B-it
"""

import argparse
import json
from pathlib import Path

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=str(sample_bundle()), help="the bundle with the drafter")
parser.add_argument("base", nargs="?", default=str(sample_base()), help="the model that it drafts for")
parser.add_argument("--prompts", type=Path, default=sample_prompts(), help="by default the sample's")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

made = mtp_extract.extract(arguments.source, "drafter", overwrite=True)
mtp_extract.validate(
    made.directory,
    source=arguments.source,
    base=arguments.base,
    prompts=arguments.prompts,
    draft_steps=(1, 3),
    new_tokens=arguments.new_tokens,
    report="report",
    overwrite=True,
    say=print,
)

report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
print(report["verdict"])
for step in report["agreement"]["steps"]:
    interval = step["ci95"]["unconditional"] or ["?", "?"]  # there is none over fewer than five texts
    low, high = (end if end == "?" else f"{end:.1%}" for end in interval)
    print(f"draft {step['step']} stands in {step['unconditional']:.1%} of {step['n']} places (95 %: {low} to {high})")
