"""A JSON schema is made of the types that write a file, and says what every field means."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

import pytest

from mtp_extract.schemas import RecordName, schema


@pytest.mark.torch
@pytest.mark.parametrize("name", get_args(RecordName))
def test_every_field_says_what_it_means(name: str) -> None:
    found = schema(name)
    for kind, part in {name: found, **found["definitions"]}.items():
        for field, of in part.get("properties", {}).items():
            assert of.get("description"), f"{kind}.{field} has no comment"


def test_a_command_prints_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_extract", "schema", "doctor"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == schema("doctor")
