"""What ``scripts/build_sample.py`` made: Google's names on the drafter, and a shape that every engine loads."""

from __future__ import annotations

from pathlib import Path

import mtp_extract
from mtp_extract.data import sample_bundle


def _names(bundle: Path) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """By role, what the constant is called, and the result of the norm's composite that reads it."""
    with mtp_extract.open(bundle) as opened:
        roles = opened.drafter().walk.roles
        return {role.role: (role.tensor.name if role.tensor else None, role.known_as[-1:]) for role in roles}


def test_its_names_are_those_that_jax2tf_wrote(sample: Path) -> None:
    """The first pair was exported as the published drafters were. Layer scalars have no name of their own there."""
    expected, found = _names(sample), _names(sample_bundle())
    scalars = {role for role in expected if role.endswith("layer_scalar")}
    assert {role: names for role, names in found.items() if role not in scalars} == {
        role: names for role, names in expected.items() if role not in scalars
    }
    with mtp_extract.open(sample_bundle()) as opened:
        assert set(opened.drafter().names.unrecognised) == scalars
        assert len(opened.drafter().names.confirmed) == 44


def test_llama_cpp_loads_it() -> None:
    """It refuses a drafter as wide as its base, and its blocks hold 32 weights of a row."""
    with mtp_extract.open(sample_bundle()) as opened:
        config = opened.drafter().config
    assert config.backbone_hidden_size > config.hidden_size
    assert config.hidden_size % 32 == 0
