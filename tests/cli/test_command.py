"""Options made of a plan's fields: what typer shows and takes of each, and what the plan is given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
from msgspec import Meta
from typer import Argument, Option
from typer.main import get_command
from typer.testing import CliRunner

import mtp_extract
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.cli import COMMANDS, convert, extract, insert, module_of, upload
from mtp_extract.cli._command import AsJson, program
from mtp_extract.errors import MtpExtractError
from mtp_extract.formats import EVERY
from mtp_extract.options import check_values, whole_numbers
from mtp_extract.pipeline.plan import DtypeName, RuleName, WritingPlan
from mtp_extract.tuning.plan import TuningPlan


@dataclass(frozen=True)
class Plan:
    directory: Annotated[Path | None, Argument(help="Where.", metavar="DIR")]
    base: Annotated[str, Option("--base", help="The base.", metavar="MODEL")]
    beside: Annotated[Sequence[Path], Option(help="Another.", metavar="DIR")] = ()
    mode: Annotated[Literal["fast", "good"], Option(help="How.")] = "good"
    engine: Annotated[Literal["vllm"] | None, Option("--for", help="For whom.")] = None
    steps: Annotated[Sequence[int], Option(help="Steps.", metavar="K,…", max=64, parser=whole_numbers)] = (1, 2)
    batch: Annotated[int, Option(help="At a time.", min=1, max=8)] = 4
    share: Annotated[float | None, Option(help="Of all.", min=0)] = None
    chat: Annotated[bool, Option(help="As chats.")] = True
    exact: Annotated[bool, Option("--exact", help="Nothing rounded.")] = False
    private: Annotated[bool, Option("--private/--public", help="Who sees it.")] = True
    out: Annotated[Path | None, Option("-o", "--out", help="Where to.", metavar="OUT")] = None
    title: Annotated[str | None, Option(help="Title.", metavar="TEXT")] = None
    timed: Annotated[int, Meta(ge=1)] = 5
    loud: str = field(default="no", repr=False)

    def __post_init__(self) -> None:
        if self.title == "":
            raise ValueError("title '': expected a word.")


def call(*given: str) -> tuple[int, Any, str]:
    """Exit status, what the command was given, and what was printed."""
    got = list[Any]()

    def command(
        plan: Plan, *, again: Annotated[bool, Option("--again", help="Once more.")] = False, print_json: AsJson = False
    ) -> None:
        """Do it."""
        got.append((plan, again, print_json))

    result = CliRunner().invoke(program(command, {})[0], list(given))
    return result.exit_code, (got or [None])[0], " ".join(result.output.split())


def test_what_is_given_reaches_the_plan() -> None:
    assert call("--base", "b")[:2] == (0, (Plan(None, "b"), False, False))
    options = """--base b --beside x --beside y --mode fast --for vllm --steps 3,1 --batch 8 --share 0 --no-chat --exact
    --public -o out --title T --again --json"""
    status, got, _ = call("d", *options.split())
    paths: dict[str, Any] = {"beside": (Path("x"), Path("y")), "out": Path("out"), "engine": "vllm"}
    numbers: dict[str, Any] = {"steps": (3, 1), "batch": 8, "share": 0.0, "title": "T", "mode": "fast"}
    expected = Plan(Path("d"), "b", **paths, **numbers, chat=False, exact=True, private=False)
    assert (status, got) == (0, (expected, True, True))
    assert type(got[0].mode) is str


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "--base"),
        ("--base b --batch 9", "--batch"),
        ("--base b --mode slow", "'--mode': Value error, 'slow' is not one of"),
        ("--base b --steps 1,x", "expected whole numbers from 1"),
        ("--base b --steps 65", "'--steps': expected steps of at most 64, found 65"),
        ("--base b --title=", "--title '': expected a word."),
        ("--base b --timed 3", "--timed"),
        ("--base b --share -1", "--share"),
    ],
)
def test_wrong_usage_is_two(options: str, said: str) -> None:
    status, got, output = call(*options.split())
    assert (status, got) == (2, None)
    assert said in output


def test_help_shows_each_field_as_it_stands_in_the_plan() -> None:
    _, _, output = call("--help")
    order = """DIR|Do it.|--base MODEL|--beside DIR|--mode <fast|good>|--for <vllm>|--steps K,…|--batch|--share|
    --chat / --no-chat|--exact|--private / --public|-o, --out OUT|--title TEXT|--again|--json"""
    places = [output.index(word.strip()) for word in re.split(r"\|(?!good>)", order)]
    assert places == sorted(places)
    for shown in ("required", "default: 1,2; x<=64", "default: 4; 1<=x<=8", "default: good", "default: private"):
        assert f"[{shown}]" in output
    assert "timed" not in output and "loud" not in output


def test_there_are_no_more_options_than_somebody_acts_on() -> None:
    commands = [get_command(module_of(name).app) for name in COMMANDS]
    options = [one.name for command in commands for one in command.params if one.opts[0].startswith("-")]
    options = [name for name in options if name not in ("version", "install_completion", "show_completion")]
    assert len(options) <= 90


@pytest.mark.parametrize(
    ("command", "function", "named"),
    [
        (extract, mtp_extract.extract, {"format", "codes", "overwrite", "sliding_window", "dtype"}),
        (convert, mtp_extract.convert, {"codes", "overwrite", "quantize"}),
        (upload, mtp_extract.upload, {"private", "force", "dry_run"}),
        (insert, mtp_extract.insert, {"graph_from", "dry_run"}),
    ],
)
def test_a_command_has_the_defaults_of_its_function(
    command: ModuleType, function: Callable[..., Any], named: set[str]
) -> None:
    options = inspect.signature(command.app.registered_commands[0].callback).parameters
    arguments = inspect.signature(function).parameters
    assert named <= options.keys() & arguments.keys()
    for name in options.keys() & arguments.keys():
        default = arguments[name].default
        if default is not inspect.Parameter.empty and name != "out":
            assert options[name].default == default, name


@pytest.mark.torch
def test_choices_are_those_of_the_library() -> None:
    from mtp_extract.tuning.latents import MODES
    from mtp_extract.tuning.loss import OBJECTIVES

    hints, written = get_type_hints(TuningPlan), get_type_hints(WritingPlan)
    assert set(get_args(hints["mode"])) == {*MODES, "ordered"}
    assert set(get_args(hints["objective"])) == set(OBJECTIVES)
    assert set(get_args(RuleName)) == set(RULES)
    assert set(get_args(DtypeName)) == {dtype for listed in EVERY.values() for dtype in listed.dtypes}
    assert written["dtype"] == DtypeName | None and written["quantize"] == RuleName | None


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"batch": 9}, MtpExtractError, "batch of at most 8"),
        ({"share": float("nan")}, MtpExtractError, "share of at least 0"),
        ({"steps": (1, 65)}, MtpExtractError, "steps of at most 64"),
        ({"timed": 0}, MtpExtractError, "timed of at least 1"),
        ({"mode": "slow"}, ValueError, "mode 'slow': expected fast or good"),
    ],
)
def test_python_meets_the_same_bounds(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    check_values(Plan(None, "b"))
    with pytest.raises(error, match=said) as caught:
        check_values(Plan(None, "b", **changes))
    if isinstance(caught.value, MtpExtractError):
        assert caught.value.remedies == tuple(changes)
