"""Look into a bundle here, on the Hub or behind a URL, and extract its drafter; of a remote one only that is fetched.

python docs/examples/extract_by_ranges.py litert-community/gemma-4-E4B-it-litert-lm
"""

import argparse

import mtp_extract
from mtp_extract.data import sample_bundle

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=sample_bundle(), help="by default the sample of the package")
parser.add_argument("--out", default="drafter", help="the new directory")
arguments = parser.parse_args()

with mtp_extract.open(arguments.source) as bundle:
    for section in bundle.sections:
        print(f"section {section.index}: {section.type_name} {section.model_type or ''}, {section.size:,} bytes")
    drafter = bundle.read_drafter()
    roles = len(drafter.structure.roles)
    print(f"the drafter: section {drafter.section.index}, found by {drafter.found_by}, {roles} roles")
    made = mtp_extract.extract(bundle, arguments.out, overwrite=True)

print(f"{made.parameters:,} parameters in {made.directory}/, proven to compute what the graph of the file computes")
for name, size in made.files.items():
    print(f"  {name}: {size:,} bytes")
