"""Options of the commands and fields of the plans: the same names, the same defaults, the same bounds."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import mtp_extract
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.cli import COMMANDS, bench, doctor, import_command, tune, validate
from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import parse_whole_numbers
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.errors import PlanError
from mtp_extract.formats import ALL_FORMATS
from mtp_extract.pipeline.plan import DtypeName, RuleName, WritingPlan
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.tuning.plan import Mode, Objective, TuningPlan
from mtp_extract.validation.plan import ValidationPlan

PLANS: dict[str, tuple[ModuleType, Any]] = {
    "bench": (bench, BenchPlan("http://localhost:8000")),
    "doctor": (doctor, DoctorPlan("drafter", "base")),
    "tune": (tune, TuningPlan(Path("drafter"), "base")),
    "validate": (validate, ValidationPlan(Path("drafter"), "base")),
}


def call(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the values that a small command was called with, and what was printed."""
    values = dict[str, Any]()

    def command(
        directory: Annotated[str | None, typer.Argument(metavar="DIR", help="Where.")] = None,
        batch: Annotated[int, typer.Option("--batch", min=1, max=8, metavar="N", help="At a time.")] = 4,
        steps: Annotated[str, typer.Option("--steps", metavar="K,…", help="Steps.")] = "1,2",
        version: Version = False,
    ) -> None:
        """Do it."""
        if batch == 5:
            raise PlanError("batch 5: expected an even number.")
        if batch == 7:
            raise PlanError("expected batch of at most 6, found 7. Lower it.", remedies=("batch", "steps", "none"))
        values.update(directory=directory, batch=batch, steps=parse_whole_numbers("steps", steps))

    app, _ = make_command(command, {"mtp-it": "Does it."}, no_arguments_is_help=False)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, values, " ".join(result.output.split())


def test_what_is_written_reaches_the_function() -> None:
    assert call() == (0, {"directory": None, "batch": 4, "steps": (1, 2)}, "")
    assert call("d", "--batch", "8", "--steps", "3,1")[1] == {"directory": "d", "batch": 8, "steps": (3, 1)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # The rest of this one is typer's own, and not the same in all of its versions.
        ("--batch 9", "Invalid value for '--batch': "),
        ("--steps 1,x", "Invalid value for '--steps': expected whole numbers from 1, such as 1,2,4,8, found '1,x'."),
        ("--steps 0", "Invalid value for '--steps': expected whole numbers from 1"),
        ("--batch 5", "Invalid value: --batch 5: expected an even number."),
        ("--batch 7", "Invalid value for '--batch', '--steps': expected batch of at most 6, found 7. Lower it."),
    ],
)
def test_wrong_usage_is_two(arguments: str, message: str) -> None:
    status, values, output = call(*arguments.split())
    assert (status, values) == (2, {})
    assert message in output


def test_help_shows_arguments_defaults_bounds_and_examples() -> None:
    _, _, output = call("--help")
    for part in (
        "[OPTIONS] [DIR]",
        "Where.",
        "--batch N At a time. [default: 4; 1<=x<=8]",
        "Steps. [default: 1,2]",
        "mtp-it Does it.",
    ):
        assert part in output


def test_there_are_no_more_options_than_somebody_acts_on() -> None:
    parameters = [parameter for name in COMMANDS for parameter in get_command(import_command(name).app).params]
    options = [option for option in parameters if option.param_type_name == "option" and option.expose_value]
    assert len(options) <= 90


@pytest.mark.parametrize(
    ("name", "otherwise"),
    [
        ("convert", {"print_json"}),
        ("extract", {"print_json", "verbose", "sample"}),
        ("insert", {"print_json"}),
        ("inspect", {"print_json", "skeleton"}),
        ("upload", {"repository", *(field.name for field in fields(mtp_extract.CardWords))}),
    ],
)
def test_a_command_has_the_arguments_and_defaults_of_its_function(name: str, otherwise: set[str]) -> None:
    defaults = defaults_of(import_command(name).app)
    arguments = inspect.signature(getattr(mtp_extract, name)).parameters
    assert defaults.keys() - arguments.keys() == otherwise
    for shared in (defaults.keys() & arguments.keys()) - {"out"}:
        if arguments[shared].default is not inspect.Parameter.empty:
            assert defaults[shared] == arguments[shared].default, shared


@pytest.mark.parametrize("name", PLANS)
def test_a_command_has_the_fields_and_defaults_of_its_plan(name: str) -> None:
    command, plan = PLANS[name]
    defaults = defaults_of(command.app)
    assert defaults.keys() - {"print_json"} <= {field.name for field in fields(plan)}
    for field in fields(plan):
        if field.name in defaults and defaults[field.name] is not None:
            default = defaults[field.name]
            several = isinstance(field.default, tuple)
            assert (parse_whole_numbers(field.name, default) if several else default) == field.default, field.name
    options = inspect.signature(command.app.registered_commands[0].callback, eval_str=True).parameters
    types = get_type_hints(type(plan))
    # These two are words at the command line, which the command reads.
    for name in options.keys() & types.keys() - {"draft_steps", "trees"}:
        assert options[name].annotation.__origin__ == types[name], name


def defaults_of(app: typer.Typer) -> dict[str, Any]:
    """Of the options, as the function is called without them; None where there is none."""
    (command,) = app.registered_commands
    parameters = inspect.signature(command.callback).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name != "version"}
    return {name: None if default is inspect.Parameter.empty else default for name, default in defaults.items()}


@pytest.mark.parametrize(("name", "count"), [("bench", 4), ("doctor", 2), ("tune", 7), ("validate", 4)])
def test_help_shows_the_fields_and_the_bounds_that_hold(name: str, count: int) -> None:
    command, plan = PLANS[name]
    function = {"doctor": "diagnose"}.get(name, name)
    text = inspect.getdoc(getattr(mtp_extract, function)) or ""
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"\* ([\w, ]+?)(?: \(.*?\))?:", text))))
    assert listed == {field.name for field in fields(plan)}

    bounds = re.findall(r"\* (\w+) \((\d+) (?:to (\d+)|or more)\)", text)
    assert len(bounds) == count
    options = inspect.signature(command.app.registered_commands[0].callback, eval_str=True).parameters
    for field, *ends in bounds:
        least, most = (int(end) if end else None for end in ends)
        several = isinstance(getattr(plan, field), tuple)
        with pytest.raises(PlanError, match=f"expected {field} of at least {least:g}, found") as refusal:
            replace(plan, **{field: (least - 1,) if several else least - 1})
        assert refusal.value.remedies == (field,)
        if most is not None:
            with pytest.raises(PlanError, match=f"expected {field} of at most {most:g}, found"):
                replace(plan, **{field: (most + 1,) if several else most + 1})
        if field in options and not several:
            (option,) = options[field].annotation.__metadata__
            assert (option.min, option.max) == (least, most), field


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (BenchPlan("http://localhost"), {"temperature": math.nan}, "temperature of at least 0, found nan"),
        (TuningPlan(Path("drafter"), "base"), {"mode": "norm"}, "mode 'norm': expected norms, .* Did you mean norms?"),
        (TuningPlan(Path("drafter"), "base"), {"objective": "x"}, "objective 'x': expected mixed, ce, kl or tv"),
        (WritingPlan(), {"format": "ggfu"}, "format 'ggfu': expected transformers, .* Did you mean gguf?"),
        (WritingPlan(), {"dtype": "fp16"}, "dtype 'fp16': expected bf16, f16, f32 or codes. Did you mean f16?"),
        (mtp_extract.CardWords(), {"license": "Apache 2"}, "license 'Apache 2': expected the Hub's name"),
    ],
)
def test_no_number_and_a_name_that_is_no_choice_are_refused(plan: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(plan, **changes)


@pytest.mark.torch
def test_choices_are_those_of_the_library() -> None:
    from mtp_extract.tuning.latents import MODES
    from mtp_extract.tuning.loss import OBJECTIVES

    assert set(get_args(Mode)) == {*MODES, "ordered"}
    assert set(get_args(Objective)) == set(OBJECTIVES)
    assert set(get_args(RuleName)) == set(RULES)
    assert set(get_args(DtypeName)) == {dtype for listed in ALL_FORMATS.values() for dtype in listed.dtypes}
