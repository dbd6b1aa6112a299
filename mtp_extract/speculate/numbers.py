"""Whole numbers that come from outside."""

from __future__ import annotations

import operator
from typing import Any

from mtp_extract.errors import MtpExtractError, escape


def count(what: str, value: Any, *, least: int) -> int:
    """``value`` as an int: any integer type, but neither a float, however whole, nor a bool.

    Raises:
        MtpExtractError: not a whole number, or less than ``least``; it names ``what``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise MtpExtractError(f"expected {what} to be a whole number of at least {least}, found {escape(value)}")
    return number
