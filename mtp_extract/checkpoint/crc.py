"""CRC-32 of a whole from the CRC-32 of its parts, so that parts can be summed by several threads.

CRC-32 is the remainder of the message as a polynomial over GF(2); appending n bits multiplies what came before by
xⁿ. Bits are reflected: the most significant bit of a word is the coefficient of x⁰.
"""

from __future__ import annotations

from functools import cache

__all__ = ["combine_crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """a · b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _x_to_the(bits: int) -> int:
    """x to the power ``bits`` modulo the polynomial."""
    result, square = _ONE, _ONE >> 1
    while bits:
        if bits & 1:
            result = _multiply(result, square)
        square, bits = _multiply(square, square), bits >> 1
    return result


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of two messages in a row, from their own and the length in bytes of the second."""
    return _multiply(first, _x_to_the(8 * second_length)) ^ second
