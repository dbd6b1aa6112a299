"""Generate with the package's own loop at several numbers of drafts a round: what is accepted, and that the text stays.

python docs/examples/count_rounds.py litert-community/gemma-4-E4B-it-litert-lm google/gemma-4-E4B-it
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.speculate.loop import SpeculativeGenerator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=sample_bundle(), help="the bundle with the drafter")
parser.add_argument("base", nargs="?", default=sample_base(), help="the model that it drafts for")
parser.add_argument("--prompt", default=read_prompts(sample_prompts())[0].content, help="by default the sample's")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

made = mtp_extract.extract(arguments.source, "drafter", overwrite=True)
base = AutoModelForCausalLM.from_pretrained(arguments.base, device_map="auto")
drafter = load_drafter(made.directory, dtype=base.dtype, device=base.device)
generator = SpeculativeGenerator(base, drafter, AutoTokenizer.from_pretrained(arguments.base))

alone = None
for drafts in (0, 1, 2, 4, 8):
    chat = [{"role": "user", "content": arguments.prompt}]
    result = generator.generate(chat, drafts=drafts, max_new_tokens=arguments.new_tokens)
    alone = alone or result
    same = "the same text" if result.text == alone.text else f"ANOTHER TEXT: {result.text!r}"
    print(
        f"{drafts} drafts: {len(result.tokens)} tokens in {len(result.rounds)} rounds, "
        f"{result.accepted} of {result.drafted} drafts accepted, {same}"
    )
print(f"the text: {alone.text!r}")
