"""Quantities name their unit; what could be bits or bytes is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from skerry_tools.plan.tables import count, flops, rate_bits, seconds, size_bytes


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (rate_bits, "5 Gbit/s", 5e9),
        (rate_bits, "5Gbps", 5e9),
        (rate_bits, "625 MB/s", 5e9),
        (rate_bits, "1 GiB/s", 8 * 2.0**30),
        (rate_bits, "+1e3 kbit/s", 1e6),
        (size_bytes, "80 GB", 80e9),
        (size_bytes, "16 GiB", 2.0**34),
        (seconds, "50 ms", 0.05),
        (seconds, 2, 2.0),
        (seconds, "1.5 h", 5400.0),
        (flops, "989 TFLOP/s", 989e12),
        (flops, 1e15, 1e15),
        (count, "12B", 12e9),
        (count, 12e9, 12e9),
        (count, "1_000_", 1000.0),
    ],
)
def test_a_quantity_is_read_with_its_unit(
    read: Callable[[object], float], text: object, value: float
) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["5 Gb/s", "5 gb/s", "5 GBps", "5 Gb", "5 GB", "5 gbps"], "write Gbit/s or GB/s"),
        (["", "fast", 5, True, None, "5 parsecs", "nan", "inf bit/s"], "write a rate"),
        (["0 Gbit/s", "-1 Gbit/s", "1e999 bit/s"], "more than 0"),
        (["0.1 bit/s", "1e19 bit/s"], "from 1 to 1e\\+18 bit/s"),
    ],
)
def test_what_is_no_rate_is_refused_with_the_way_to_write_it(
    texts: list[object], message: str
) -> None:
    for text in texts:
        with pytest.raises(PydanticCustomError, match=message):
            rate_bits(text)


@pytest.mark.parametrize("read", [size_bytes, seconds, flops, count])
def test_a_unit_of_something_else_is_refused(read: Callable[[object], float]) -> None:
    with pytest.raises(PydanticCustomError, match="write a"):
        read("5 Gbit/s")


@given(st.text(max_size=20))
def test_any_text_is_a_rate_or_is_refused(text: str) -> None:
    with suppress(PydanticCustomError):
        assert rate_bits(text) > 0
