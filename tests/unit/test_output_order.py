"""The record of the order in which two streams came."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openjobs.errors import Damaged
from openjobs.processes import layout, read_output
from openjobs.processes.order import BLOCK, Order, OrderEncoder

CHUNKS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 70_000)), max_size=40).flatmap(
    lambda some: st.integers(1, 60).map(lambda times: some * times)
)


@contextmanager
def opened(path: Path, data: bytes) -> Iterator[Order]:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield Order(fd)
    finally:
        os.close(fd)


def encoded(chunks: list[tuple[int, int]]) -> bytes:
    encoder = OrderEncoder()
    return b"".join(encoder.entry(*chunk) for chunk in chunks)


@given(chunks=CHUNKS, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_place_is_found_again(chunks: list[tuple[int, int]], data: st.DataObject, tmp_path: Path) -> None:
    """From every offset on, the pieces are those that a plain list of all pieces gives."""
    total = sum(length for _, length in chunks)
    offset = data.draw(st.integers(0, total + 5))
    expected = []
    ends, at = [0, 0], 0
    for stream, length in chunks:
        skip = max(0, offset - at)
        if skip < length:
            expected.append((stream, ends[stream] + skip, length - skip))
        ends[stream] += length
        at += length
    with opened(tmp_path / "order", encoded(chunks)) as order:
        assert list(order.chunks(offset)) == expected
        assert order.ends() == tuple(ends)
        assert order.total() == total


@given(chunks=CHUNKS, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_nothing_is_wrong_with_what_a_keeper_wrote(
    chunks: list[tuple[int, int]], data: st.DataObject, tmp_path: Path
) -> None:
    """Wherever its keeper was killed; a look at all of it ends where a reader's does."""
    written = encoded(chunks)
    with opened(tmp_path / "order", written[: data.draw(st.integers(0, len(written)))]) as order:
        assert order.check() == order.ends()


@given(chunks=CHUNKS, data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_cut_file_gives_the_beginning(chunks: list[tuple[int, int]], data: st.DataObject, tmp_path: Path) -> None:
    """Cut anywhere, as a crash may leave it: whole entries count, the torn one does not, nothing is invented."""
    whole = encoded(chunks)
    cut = data.draw(st.integers(0, len(whole)))
    with opened(tmp_path / "order", whole) as order:
        all_of_it = list(order.chunks(0))
    with opened(tmp_path / "order", whole[:cut]) as order:
        some = list(order.chunks(0))
        assert some == all_of_it[: len(some)]
        assert order.total() == sum(length for _, _, length in some)


@pytest.mark.parametrize("length", [1, 63])
def test_small_pieces_cost_one_byte_each(length: int) -> None:
    """The order is never much larger than what it orders."""
    data = encoded([(n % 2, length) for n in range(100_000)])
    assert len(data) <= 100_000 * 1.005 + BLOCK


def test_a_place_in_a_long_order_costs_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million pieces: the last one is found with a number of reads that grows with the logarithm."""
    data = encoded([(n % 2, 1) for n in range(1_000_000)])
    reads = 0
    real = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    with opened(tmp_path / "order", data) as order:
        assert list(order.chunks(999_999)) == [(1, 499_999, 1)]
    assert reads <= 12


def test_an_order_that_begins_elsewhere_is_refused(tmp_path: Path) -> None:
    """Whoever copies all of it from offset to offset would get the same bytes for ever."""
    data = encoded([(1, 4), (0, 4)])
    for at in (3, 12):
        with opened(tmp_path / "order", data[:at] + b"\x01" + data[at + 1 :]) as order:
            with pytest.raises(ValueError, match="begin at 0"):
                order.total()
            with pytest.raises(ValueError, match="begin at 0"):
                list(order.chunks(0))


def test_an_order_that_says_more_than_there_is_leaves_nothing_out_unsaid(tmp_path: Path) -> None:
    """Both streams are still read by themselves; a mixed text that cannot be made whole is refused."""
    for name, data in ((layout.STDOUT, b"one\n"), (layout.STDERR, b"two\n"), (layout.KEEPER, b"{}\n{}\n")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / layout.ORDER).write_bytes(encoded([(1, 600), (0, 4), (1, 4)]))
    with pytest.raises(Damaged, match="more was written"):
        read_output(tmp_path)
    assert [read_output(tmp_path, name).data for name in ("stdout", "stderr")] == [b"one\n", b"two\n"]
