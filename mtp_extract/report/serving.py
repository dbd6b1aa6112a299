"""How to serve a drafter: the section of a model card with a command for each engine that loads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtp_extract.errors import escape
from mtp_extract.formats import engines_for
from mtp_extract.report.markdown import code

_TRANSFORMERS = """\
**transformers** (run with 5.22.2; 5.23.0 cannot construct a Gemma 4 assistant)

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("BASE_MODEL")
model = AutoModelForCausalLM.from_pretrained("BASE_MODEL", dtype="bfloat16", device_map="auto")
drafter = AutoModelForCausalLM.from_pretrained("DRAFTER", dtype="bfloat16", device_map="auto")
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Name three rivers."}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device)
output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```
"""

_VLLM = """\
**vLLM** (0.33.0: its loader was run, its kernels want a GPU)

```sh
vllm serve BASE_MODEL \\
  --speculative-config '{"method":"mtp","model":"DRAFTER","num_speculative_tokens":4}'
```
"""

_SGLANG = """\
**SGLang** (0.5.23: its reading of the configuration was run, the rest read in its source)

```sh
python -m sglang.launch_server --model-path BASE_MODEL \\
  --speculative-algorithm NEXTN --speculative-draft-model-path DRAFTER \\
  --speculative-num-steps 5 --speculative-num-draft-tokens 6 --speculative-eagle-topk 1
```
"""

_MLX = """\
**mlx-vlm** (run with 0.7.10)

```sh
python -m mlx_vlm generate --model BASE_MODEL --prompt "Name three rivers." \\
  --draft-model DRAFTER --draft-kind mtp --draft-block-size 4
```
"""

_LLAMA = """\
**llama.cpp** (run at commit 0c1e57098; `target.gguf` is the base)

```sh
llama-server -m target.gguf -md WEIGHTS --spec-type draft-mtp --spec-draft-n-max 4
```
"""

_ENGINES = {"transformers": _TRANSFORMERS, "vllm": _VLLM, "sglang": _SGLANG, "mlx-vlm": _MLX}
"""Of engines that load a directory, by their name in :data:`~mtp_extract.formats.ENGINES`."""

_HEAD_VLLM = """\
**vLLM** (0.33.0: its loader and its module of such a head were run, on a CPU)

```sh
vllm serve BASE_MODEL \\
  --speculative-config '{"method":"eagle3","model":"DRAFTER","num_speculative_tokens":3}'
```
"""

_HEAD_SGLANG = """\
**SGLang** (0.5.23: read in its source)

```sh
python -m sglang.launch_server --model-path BASE_MODEL \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFTER \\
  --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
```
"""

_HEAD_LLAMA = """\
**llama.cpp** (0c1e570: such heads were run; a head that reads what leaves the base's last layer it cannot serve)

```sh
python convert_hf_to_gguf.py DRAFTER --target-model-dir BASE_MODEL --outfile eagle3-drafter.gguf
llama-server -m base.gguf -md eagle3-drafter.gguf --spec-type draft-eagle3 --spec-draft-n-max 3
```
"""


def how_to_serve(record: Mapping[str, Any], base: str, *, head: bool, source: str | None) -> str:
    """A command for each engine that loads a directory, in Markdown.

    Args:
        record: the content of ``extraction.json``.
        base: id of the base on the Hub, or what stands for it.
        head: whether it is an EAGLE-3 head.
        source: how to name its bundle on a command line, as one shell word; None for a checkpoint of unknown origin.
    """
    engines = engines_for(record["layout"])
    intro = (
        "`DRAFTER` is this directory or its id on the Hub. Greedy text is the base's own in F32; in BF16 it may part "
        "from it where two tokens of the base nearly tie. "
    )
    if head:
        intro += "This copy was run in none of these engines: names, shapes and flags were held against their loaders."
        parts = [_HEAD_VLLM, _HEAD_SGLANG if "sglang" in engines else _HEAD_OTHER]
        if not record["geometry"].get("fc_norm") and not record["geometry"].get("norm_output"):
            parts.append(_HEAD_LLAMA)
    else:
        intro += (
            "Use BF16: Gemma 4's activations leave the range of FP16. \"Run\" means that mtp-extract's own pair of "
            "base and drafter was run there, on a CPU."
        )
        again = "mtp-convert DRAFTER" if source is None else f"mtp-extract {source}"
        parts = [_ENGINES[engine] for engine in engines if engine in _ENGINES]
        if record["layout"].startswith("compressed-tensors"):
            parts = [part.replace("5.22.2;", "5.22.2 and compressed-tensors 0.20.0;") for part in parts]
        if not engines:
            parts.append(
                f"`mtp-validate` and the Python API of mtp-extract read the {code(record['layout'])} format. Engines "
                f"read others:\n\n```sh\n{again} --format transformers\n```\n"
            )
        if "llama.cpp" in engines:
            weights = next(name for name in record["files"] if name.endswith(".gguf"))
            parts.append(_LLAMA.replace("WEIGHTS", shell_word(f"DRAFTER/{weights}")))
        else:
            convert = f"{again} --format gguf -o drafter-gguf\nllama-server"
            parts.append(_LLAMA.replace("llama-server", convert).replace("WEIGHTS", "drafter-gguf/mtp-*.gguf"))
    return "\n".join([f"{intro}\n", *(part.replace("BASE_MODEL", base) for part in parts)])


_HEAD_OTHER = "SGLang reads the other layout: `mtp-convert DRAFTER --format eagle3`.\n"


def shell_word(text: object) -> str:
    """``text`` as one shell word within a fenced block, which a backtick could end."""
    word = escape(text).replace("`", "")
    return word if re.fullmatch(r"[\w/:@.+%=,-]+", word) else "'" + word.replace("'", "'\\''") + "'"
