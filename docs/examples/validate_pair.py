"""Validate a drafter against its bundle and beside its base, and read the verdict and the figures from the report.

python docs/examples/validate_pair.py litert-community/gemma-4-E4B-it-litert-lm google/gemma-4-E4B-it
"""

import argparse
import json
import math
from pathlib import Path

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts


class Printed(mtp_extract.Reporter):
    """Prints what is begun."""

    def say(self, text: str) -> None:
        """Print it."""
        print(text)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=str(sample_bundle()), help="the bundle with the drafter")
parser.add_argument("base", nargs="?", default=str(sample_base()), help="the model that it drafts for")
parser.add_argument("--prompts", type=Path, default=sample_prompts(), help="by default the sample's")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

made = mtp_extract.extract(arguments.source, "drafter", overwrite=True)
plan = mtp_extract.ValidationPlan(
    made.directory,
    source=arguments.source,
    base=arguments.base,
    prompts=arguments.prompts,
    draft_steps=(1, 3),
    new_tokens=arguments.new_tokens,
    report=Path("report"),
    overwrite=True,
)
mtp_extract.validate(plan, Printed())

report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
print(report["verdict"])
for step in report["drafters"][0]["agreement"]["steps"]:
    accepted = step["conditional"]  # of the places at which all drafts before it were accepted
    low, high = accepted["ci95"] or (math.nan, math.nan)  # there is no interval over fewer than five texts
    interval = f"95 %: {low:.1%} to {high:.1%}"
    print(f"draft {step['step']} stands in {accepted['value']:.1%} of {accepted['n']} places ({interval})")
