"""Files of prompts: every form that is taken, what is refused and how it is said, and the prompts that are shipped."""

from __future__ import annotations

import json
import string
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluation.prompts import FEW_PER_WORKLOAD, Prompt, load_shipped_prompts, read_prompts
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, choose_side, split_prompts
from mtp_extract.tuning.plan import TuningPlan

USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
AGAIN = {"role": "user", "content": "Really?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
SILENT = {**CALL, "content": ""}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "input_text", "text": "is this?"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEEN = {"role": "user", "content": [*PARTS["content"], IMAGE]}

ROWS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "of a workload": ({"prompt": "a", "workload": "w", "source": "s"}, Prompt("w", "a", "s")),
    "TRL": ({"prompt": "The sky is", "completion": " blue."}, Prompt("file", "The sky is", completion=" blue.")),
    "OpenAI": ({"messages": [SYSTEM, USER, ASSISTANT]}, Prompt("file", (SYSTEM, USER), completion="Because.")),
    "OpenAI, a call": (
        {"messages": [USER, CALL, {"role": "tool", "content": "3", "tool_call_id": "x"}]},
        Prompt("file", (USER, SILENT, {"role": "tool", "content": "3", "tool_call_id": "x"})),
    ),
    "OpenAI, ends in a call": ({"messages": [USER, CALL]}, Prompt("file", (USER,))),
    "OpenAI, in parts": (
        {"messages": [PARTS, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]},
        Prompt("file", ({"role": "user", "content": "What\nis this?"},), completion="A cat."),
    ),
    "a chat and its answer": ({"messages": [USER], "completion": "Yes."}, Prompt("file", (USER,), completion="Yes.")),
    "no answer": ({"messages": [USER, ASSISTANT, AGAIN]}, Prompt("file", (USER, ASSISTANT, AGAIN))),
    "UltraChat": ({"prompt": "Why?", "messages": [USER, ASSISTANT]}, Prompt("file", (USER,), completion="Because.")),
    "MT-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        Prompt("file", "Write."),
    ),
    "fields that say nothing": (
        {"prompt": "a", "turns": None, "messages": None, "workload": None, "source": "", "completion": ""},
        Prompt("file", "a"),
    ),
    "signs that end lines elsewhere": ({"prompt": "a\u2028b\x85c\x0bd\r\n"}, Prompt("file", "a\u2028b\x85c\x0bd\r\n")),
}


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_objects(tmp_path: Path, name: str) -> None:
    """Whatever stands before and after."""
    row, wanted = ROWS[name]
    rows = [{"prompt": "before"}, row, {"prompt": "after"}]
    expected = (Prompt("file", "before"), wanted, Prompt("file", "after"))
    lines = "\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read_prompts(written(tmp_path / "file.JSONL", lines)) == expected


def test_lines(tmp_path: Path) -> None:
    lines = written(tmp_path / "file.txt", "\ufeffone\r\n\n  two \x85 of it\n \nthree")
    texts = ("one", "  two \x85 of it", "three")
    assert read_prompts(lines) == tuple(Prompt("file", text, source=text) for text in texts)


BAD: dict[str, tuple[str, str, str]] = {
    "no object": ("x.jsonl", '{"prompt": "a"}\n\n[1]', r"line 3: .*got `array`\. Write it so"),
    "not JSON": ("x.jsonl", '{"prompt": "a"}\nplain words', "line 2: JSON is malformed"),
    "text": ("x.jsonl", '{"text": "a"}', r'expected prompts.*\{"prompt": "…"\}.*line 1: no prompt'),
    "a number": ("x.jsonl", '{"prompt": 3}', r"line 1: .*got `int` - at `\$\.prompt`"),
    "nothing asked": ("x.jsonl", '{"prompt": " ", "messages": []}', "line 1: no prompt"),
    "an answer alone": ("x.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: no prompt"),
    "no role": ("x.jsonl", '{"messages": [{"content": "a"}]}', "line 1: messages without a role"),
    "no content": ("x.jsonl", '{"messages": [{"role": "user"}]}', "line 1: messages without a role or content"),
    "an answer of parts": (
        "x.jsonl",
        '{"messages": [{"role": "assistant", "content": [1]}]}',
        "line 1: .*text but int",
    ),
    "an image": ("x.jsonl", json.dumps({"messages": [SEEN]}), "line 1: .*no text but image_url, and only text can be"),
    "content of a number": (
        "x.jsonl",
        '{"messages": [{"role": "user", "content": 3}]}',
        "line 1: content of type int, neither",
    ),
    "nothing in a chat": ("x.jsonl", '{"messages": [{"role": "user", "content": null}]}', "line 1: no prompt"),
    "a workload that is none": ("x.jsonl", '{"prompt": "a", "workload": true}', r"\$\.workload"),
    "half a character": ("x.jsonl", '{"prompt": "\\ud800"}', "line 1: "),
    "not UTF-8": ("x.txt", "\ud800", "'utf-8' codec can't decode"),
    "too deep": ("x.jsonl", '{"x": ' + "[" * 100_000, "recursion|nested"),
    "nothing": ("x.jsonl", "\n", "at least one prompt, found none"),
    "JSON that is no lines": ("x.json", '{"w": ["a"]}', r"\.jsonl, an object a line.*a name that ends in \.json"),
    "no ending": ("x", "a", "a name without an ending"),
    "a name and text of control": ("x\x1b.jsonl", '{"\x1b[31m": 1}', r"x\\x1b\.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(tmp_path: Path, name: str) -> None:
    """With the file, the place, what was found, and an example of what is right; safe to show."""
    file, text, message = BAD[name]
    with pytest.raises(MtpExtractError, match=message) as found:
        read_prompts(written(tmp_path / file, text))
    message = str(found.value)
    assert message.isprintable()
    assert message.startswith(str(tmp_path))
    assert "expected" in message
    assert len(message) < 1000


def test_absent_and_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MtpExtractError, match="No such file"):
        read_prompts(tmp_path / "absent.txt")
    monkeypatch.setattr("mtp_extract.evaluation.prompts.LARGEST_PROMPTS_FILE", 10)
    with pytest.raises(MtpExtractError, match="expected at most 10 bytes, found 11"):
        read_prompts(written(tmp_path / "x.txt", "a" * 11))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt", "messages", "turns", "role", "content", "completion", "source", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(JSON, min_size=1, max_size=3), form=st.sampled_from(["jsonl", "txt"]))
def test_anything_is_read_or_refused(tmp_path: Path, rows: list[Any], form: str) -> None:
    lines = "\n".join(json.dumps(row) for row in rows)
    path = written(tmp_path / f"x.{form}", lines)
    try:
        found = read_prompts(path)
    except MtpExtractError as error:
        assert str(error).isprintable()
    else:
        assert all(prompt.content and prompt.source and prompt.workload for prompt in found)


def test_messages_are_no_text(tmp_path: Path) -> None:
    rows = written(tmp_path / "x.jsonl", json.dumps({"messages": [USER]}))
    with pytest.raises(MtpExtractError, match="found: line 1: messages where no chat template is"):
        read_prompts(rows, chat_template=False)
    assert read_prompts(rows) == (Prompt("x", (USER,)),)


def test_a_server_may_be_shown_images(tmp_path: Path) -> None:
    rows = written(tmp_path / "x.jsonl", json.dumps({"messages": [SYSTEM, SEEN]}))
    assert read_prompts(rows, text_alone=False) == (Prompt("x", (SYSTEM, SEEN)),)


def test_prompts_of_one_source_are_told_what_a_source_does(tmp_path: Path) -> None:
    """More of them would be on the same side."""
    rows = "\n".join(json.dumps({"prompt": f"question {number}", "source": "wiki"}) for number in range(200))
    plan = TuningPlan(Path("drafter"), "base", prompts=written(tmp_path / "x.jsonl", rows))
    with pytest.raises(MtpExtractError, match=r"found 200 prompts of 1 source, .*leave `source` out\.$"):
        split_prompts(plan)
    few = TuningPlan(Path("drafter"), "base", prompts=written(tmp_path / "few.txt", "a\nb\nc"))
    with pytest.raises(MtpExtractError, match=r"found 3 prompts of 3 sources, .* Give some hundred\.$"):
        split_prompts(few)


def test_equal_prompts_have_one_key() -> None:
    other = ({"content": "Why?", "role": "user"},)
    assert Prompt("w", (USER,)).key == Prompt("v", other, "s", "c").key != Prompt("w", "Why?").key


WORKLOADS = ("chat", "code", "math", "prose", "json")


def test_shipped_prompts() -> None:
    prompts = load_shipped_prompts()
    counts = Counter(prompt.workload for prompt in prompts)
    assert tuple(counts) == WORKLOADS
    assert min(counts.values()) >= 66
    lengths = sorted(len(prompt.content) for prompt in prompts)
    # One-liners and passages of several paragraphs.
    assert lengths[len(lengths) // 10] < 60
    assert lengths[-16] > 600
    # Of a base with a context of 1024 tokens the longest leave 256, also with a tokenizer of few letters a token.
    assert lengths[-1] < 960
    for a, b in combinations([alike(str(prompt.content)) for prompt in prompts], 2):
        assert len(a & b) < 0.5 * min(len(a), len(b))


def alike(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of three words, or all of them."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split() or list(text)
    return frozenset(zip(*(words[at:] for at in range(3)), strict=False)) or frozenset([tuple(words)])


def test_enough_shipped_prompts_are_held_out() -> None:
    """For the default of a training: 30 held out and 5 of every workload, with some to spare for what repeats."""
    sides = Counter((choose_side(prompt.source), prompt.workload) for prompt in load_shipped_prompts())
    for name in WORKLOADS:
        assert sides[HELD_OUT, name] >= 8
        assert sides[WATCHED, name] >= 4
        assert sides[TRAINED, name] >= 40


def test_about_a_hundred_where_all_would_take_long(tmp_path: Path) -> None:
    few, every = read_prompts(None), load_shipped_prompts()
    assert Counter(prompt.workload for prompt in few) == dict.fromkeys(WORKLOADS, FEW_PER_WORKLOAD)
    assert len({prompt.key for prompt in few}) == len(few)
    # Spread over all of a workload.
    for name in WORKLOADS:
        of_name = [prompt for prompt in every if prompt.workload == name]
        at = [of_name.index(prompt) for prompt in few if prompt.workload == name]
        steps = {after - before for before, after in pairwise(at)}
        assert max(steps) - min(steps) <= 1
    assert len(load_shipped_prompts(10_000)) == len(every)
    assert read_prompts(written(tmp_path / "x.txt", string.digits)) == (Prompt("x", string.digits),)
