"""In which order two streams came, so that one mixed text can be made of them again.

The keeper writes stdout and stderr to a file each, and after every chunk one entry to a third file,
`order`. It is made of blocks of 4096 bytes. A block begins with how much of stdout and of stderr came
before it (two big-endian 64-bit numbers), so that any place is found by halving; then come entries,
`length * 2 + stream` as LEB128 (one to five bytes); what an entry does not fit into is zeros.

The bytes are written before their entry: after a kill the streams may be longer than their order,
never shorter, and an entry without its end is the last thing in the file.

Only the standard library at import: the keeper runs this.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

BLOCK = 4096
STREAMS = ("stdout", "stderr")
_HEADER = struct.Struct(">QQ")
_MAX_BYTES = 2**62
_MAX_SHIFT = 35


class OrderEncoder:
    """Turns chunks into the bytes to append to an `order` file that it began."""

    def __init__(self) -> None:
        self._size = 0
        self._ends = [0, 0]

    def entry(self, stream: int, length: int) -> bytes:
        code = _leb128(length << 1 | stream)
        room = -self._size % BLOCK
        data = code
        if room < len(code):
            data = bytes(room) + _HEADER.pack(*self._ends) + code
        self._size += len(data)
        self._ends[stream] += length
        return data


class Order:
    """An `order` file, open for reading; it may still grow. Reads one block at a time, whatever its size.

    Raises ValueError for bytes that no keeper wrote, where that is seen.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def total(self) -> int:
        """How many bytes of both streams have a known order."""
        return sum(self.ends())

    def ends(self) -> tuple[int, int]:
        """How many bytes of each stream have a known order."""
        blocks = self._blocks()
        if blocks == 0:
            return 0, 0
        ends = list(self._base(blocks - 1))
        for stream, length in self._entries(blocks - 1):
            ends[stream] += length
        return ends[0], ends[1]

    def check(self) -> tuple[int, int]:
        """As `ends`, of every block and entry, and with a look at all that no reader needs to look at.

        Raises ValueError. An entry without its end is none, and the last thing that a killed keeper wrote.
        """
        ends = [0, 0]
        blocks = self._blocks()
        for block in range(blocks):
            if self._base(block) != tuple(ends):
                raise ValueError(f"block {block} of the order of output does not begin where the one before it ends")
            before = sum(ends)
            for stream, length in self._entries(block):
                ends[stream] += length
            if sum(ends) == before and block < blocks - 1:
                raise ValueError(f"block {block} of the order of output has no entry")
        return ends[0], ends[1]

    def chunks(self, offset: int) -> Iterator[tuple[int, int, int]]:
        """(stream, where in that stream, length), in order, from byte `offset` of the mixed text on."""
        blocks = self._blocks()
        if blocks == 0:
            return
        low, high = 0, blocks - 1
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self._base(middle)) <= offset:
                low = middle
            else:
                high = middle - 1
        ends = list(self._base(low))
        for block in range(low, blocks):
            for stream, length in self._entries(block):
                skip = offset - sum(ends)
                if skip < length:
                    skip = max(skip, 0)
                    yield stream, ends[stream] + skip, length - skip
                ends[stream] += length

    def _blocks(self) -> int:
        size = os.fstat(self._fd).st_size
        return size // BLOCK + (size % BLOCK > _HEADER.size)

    def _base(self, block: int) -> tuple[int, int]:
        data = os.pread(self._fd, _HEADER.size, block * BLOCK)
        if len(data) < _HEADER.size:
            raise ValueError(f"block {block} of the order of output was cut off while it was read")
        stdout, stderr = _HEADER.unpack(data)
        if max(stdout, stderr) > _MAX_BYTES:
            raise ValueError(f"block {block} of the order of output begins beyond any file")
        if block == 0 and (stdout or stderr):
            # Believed, every place before it would have the same bytes, and who copies all would never end.
            raise ValueError("the order of output does not begin at 0")
        return stdout, stderr

    def _entries(self, block: int) -> Iterator[tuple[int, int]]:
        value = shift = 0
        for byte in os.pread(self._fd, BLOCK - _HEADER.size, block * BLOCK + _HEADER.size):
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > _MAX_SHIFT:
                raise ValueError(f"block {block} of the order of output has an entry without end")
            if byte < 0x80:
                if value >> 1:
                    yield value & 1, value >> 1
                value = shift = 0


def _leb128(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
