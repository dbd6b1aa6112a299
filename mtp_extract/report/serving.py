"""How to serve a drafter: a command for each engine that loads it, for a model card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.formats import engines_for

_PYTHON = """\
# transformers 5.22.2 (5.23.0 cannot construct a Gemma 4 assistant)
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE_MODEL", dtype="bfloat16", device_map="auto")
drafter = AutoModelForCausalLM.from_pretrained("DRAFTER", dtype="bfloat16", device_map="auto")
output = base.generate(**inputs, assistant_model=drafter, max_new_tokens=128)"""
_LLAMA = "llama-server -m target.gguf -md WEIGHTS --spec-type draft-mtp --spec-draft-n-max 4"
_COMMANDS = {
    "vllm": """\
# vLLM 0.33.0 (its loader was run, its kernels want a GPU)
vllm serve BASE_MODEL \\
  --speculative-config '{"method":"mtp","model":"DRAFTER","num_speculative_tokens":4}'""",
    "sglang": """\
# SGLang 0.5.23 (read in its source)
python -m sglang.launch_server --model-path BASE_MODEL \\
  --speculative-algorithm NEXTN --speculative-draft-model-path DRAFTER \\
  --speculative-num-steps 5 --speculative-num-draft-tokens 6 --speculative-eagle-topk 1""",
    "mlx-vlm": """\
# mlx-vlm 0.7.10
python -m mlx_vlm generate --model BASE_MODEL --prompt "Name three rivers." \\
  --draft-model DRAFTER --draft-kind mtp --draft-block-size 4""",
}
_HEAD_COMMANDS = {
    "vllm": """\
# vLLM 0.33.0 (its loader and its module of such a head were run, on a CPU)
vllm serve BASE_MODEL \\
  --speculative-config '{"method":"eagle3","model":"DRAFTER","num_speculative_tokens":3}'""",
    "sglang": """\
# SGLang 0.5.23 (read in its source)
python -m sglang.launch_server --model-path BASE_MODEL \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER \\
  --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4""",
    "llama.cpp": """\
# llama.cpp at 0c1e570 (such heads were run)
python convert_hf_to_gguf.py DRAFTER --target-model-dir BASE_MODEL --outfile eagle3-drafter.gguf
llama-server -m base.gguf -md eagle3-drafter.gguf --spec-type draft-eagle3 --spec-draft-n-max 3""",
}


def how_to_serve(record: Mapping[str, Any], base: str, *, head: bool, again: str) -> str:
    """A command for each engine that loads a directory, in Markdown.

    Args:
        record: the content of ``extraction.json``.
        base: id of the base on the Hub, or what stands for it.
        head: whether it is an EAGLE-3 head.
        again: the command that writes the directory in another format, which is to be named.
    """
    engines = engines_for(record["layout"])
    blocks = [_PYTHON] if "transformers" in engines and not head else []
    if head:
        # llama.cpp knows no head that reads what leaves the base's last layer.
        known = ("vllm", *engines, *(() if record["geometry"].get("norm_output") else ("llama.cpp",)))
        commands = [_HEAD_COMMANDS[engine] for engine in _HEAD_COMMANDS if engine in known]
    else:
        commands = [_COMMANDS[engine] for engine in engines if engine in _COMMANDS]
        if "llama.cpp" in engines:
            weights = next(name for name in record["files"] if name.endswith(".gguf"))
            commands.append(f"# llama.cpp at 0c1e57098\n{_LLAMA.replace('WEIGHTS', shell_word(f'DRAFTER/{weights}'))}")
        else:
            weights = "drafter-gguf/mtp-*.gguf"
            convert = f"{again} --format gguf -o drafter-gguf"
            commands.append(f"# llama.cpp at 0c1e57098\n{convert}\n{_LLAMA.replace('WEIGHTS', weights)}")
        if not engines:
            commands.append(f"# engines read other formats, such as\n{again} --format transformers")
    fenced = [f"```python\n{block}\n```" for block in blocks] + [f"```sh\n{command}\n```" for command in commands]
    return "\n\n".join(fenced).replace("BASE_MODEL", base)


def shell_word(text: object) -> str:
    """``text`` as one shell word within a fenced block, which a backtick could end."""
    word = escape(text).replace("`", "")
    return word if re.fullmatch(r"[\w/:@.+%=,-]+", word) else "'" + word.replace("'", "'\\''") + "'"
