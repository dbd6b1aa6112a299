"""Generate in transformers with the drafter as assistant: the same text as without it, in fewer passes of the base.

python docs/examples/draft_in_transformers.py litert-community/gemma-4-E4B-it-litert-lm google/gemma-4-E4B-it
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.evaluation.prompts import read_prompts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", nargs="?", default=sample_bundle(), help="the bundle with the drafter")
parser.add_argument("base", nargs="?", default=sample_base(), help="the model that it drafts for")
parser.add_argument("--prompt", default=read_prompts(sample_prompts())[0].content, help="by default the sample's")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

made = mtp_extract.extract(arguments.source, "drafter", overwrite=True)
base = AutoModelForCausalLM.from_pretrained(arguments.base, device_map="auto")
drafter = AutoModelForCausalLM.from_pretrained(made.directory, dtype=base.dtype, device_map="auto")

tokenizer = AutoTokenizer.from_pretrained(arguments.base)
chat = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(base.device)

passes = []
base.register_forward_hook(lambda *_: passes.append(1))
for name, assistant in (("alone", None), ("with the drafter", drafter)):
    passes.clear()
    tokens = base.generate(**inputs, assistant_model=assistant, do_sample=False, max_new_tokens=arguments.new_tokens)
    text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{name}, {len(passes)} passes of the base: {text!r}")
