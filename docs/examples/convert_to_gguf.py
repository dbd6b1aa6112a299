"""Convert a drafter into a GGUF for llama.cpp, with the file's own integers, and look at what the GGUF holds.

python docs/examples/convert_to_gguf.py litert-community/gemma-4-E4B-it-litert-lm
"""

import argparse

import mtp_extract
from mtp_extract.data import sample_bundle

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=sample_bundle(), help="the bundle with the drafter")
arguments = parser.parse_args()

# The integers that the bundle stores go along as codes; without them a GGUF of floats would be made.
made = mtp_extract.extract(arguments.source, "drafter", codes=True, overwrite=True)
converted = mtp_extract.convert(made.directory, "drafter-gguf", format="gguf", overwrite=True)
print(f"{made.files['model.safetensors']:,} bytes in BF16")
for name, size in converted.files.items():
    print(f"{size:,} bytes in {converted.directory / name}")
for note in converted.notes:
    print(f"note: {note}")

stored = mtp_extract.inspect(converted.directory).report["holds"]["stored_types"]
print("stored as", ", ".join(f"{kind}: {count} tensors" for kind, count in stored.items()))
