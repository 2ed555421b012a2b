"""The archive of one session: a tar file of which every byte is accounted for.

    <session id>/session.json     what it is: format, session, commit, when, how much was unfinished
    <session id>/*.jsonl          the session's ledgers, cut at whole records
    <session id>/repo.bundle      the repository (repo/bundle.py)
    <session id>/runs/<run id>/…  logs and output
    <session id>/SHA256SUMS       a line for each member before it, in order; the last member

`tar xf`, `sha256sum -c SHA256SUMS` and `git clone repo.bundle` read it without us. We read it more
strictly than tar does: a header must be, byte for byte, the one that we would write for that name and
length, filling must be zeros, and nothing may follow the end. So links, devices, paths that lead
elsewhere, extended headers and any flipped bit are refused by one comparison.

Pure but for the descriptor that each end is given. Source: tar(5), the ustar format.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from ..durable import Disk
from ..errors import ArchiveRefused, Damaged, InvalidInput
from ..ids import is_session_id
from ..session import strict_json

FORMAT = 1
ABOUT = "session.json"
BUNDLE = "repo.bundle"
SUMS = "SHA256SUMS"

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_PIECE_BYTES = 1 << 20
_ABOUT_MOST_BYTES = 64 << 10
#: a ustar header has eleven octal digits for the length
MEMBER_MOST_BYTES = 8**11 - 1
_LEDGER = r"[a-z][a-z0-9-]{0,62}\.jsonl"
_RUN = r"runs/[A-Za-z0-9_][A-Za-z0-9_-]{0,127}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
#: what may be in it; everything else is refused
NAME = re.compile(rf"(?:{re.escape(ABOUT)}|{re.escape(BUNDLE)}|{_LEDGER}|{_RUN})\Z")
LEDGER = re.compile(rf"{_LEDGER}\Z")
RUN_FILE = re.compile(rf"{_RUN}\Z")

_ADVICE = "nothing was imported. Copy the archive again, or export the session anew"


@attrs.frozen(kw_only=True, slots=True)
class About:
    """What an archive says of itself."""

    session_id: str
    commit_id: str
    #: full name of the branch, as git has it
    branch: str
    #: ISO-8601, UTC
    exported_at: str
    #: the version that wrote it
    openjobs: str
    jobs: int = 0
    unfinished_jobs: int = 0
    unfinished_tasks: int = 0

    def encode(self) -> bytes:
        return strict_json.dumps({"format": FORMAT, **attrs.asdict(self)}) + b"\n"


def header(path: str, size: int) -> bytes:
    """The one header of a member. Raises `InvalidInput` where the format has no room for name or length."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, 0o600
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except ValueError as error:
        raise InvalidInput(f"{path} of {size} bytes does not fit into an archive: {error}") from None


def sum_line(digest: str, name: str) -> bytes:
    """As `sha256sum` prints it."""
    return f"{digest}  {name}\n".encode()


class ArchiveWriter:
    """Writes to `fd`, which must be a regular file at its beginning; nothing is synced."""

    def __init__(self, fd: int, disk: Disk, session_id: str) -> None:
        self._fd, self._disk, self._top = fd, disk, session_id
        self._sums: list[bytes] = []
        #: where the content of the newest member begins, and how much of it there is
        self.at = self.size = 0

    def add(self, name: str, pieces: Iterable[bytes]) -> None:
        """A member whose length shows only when it is written: its header is put in place then."""
        header_at = os.lseek(self._fd, 0, os.SEEK_CUR)
        self._disk.write(self._fd, bytes(_BLOCK))
        self.at, self.size, digest = header_at + _BLOCK, 0, hashlib.sha256()
        for piece in pieces:
            self.size += self._disk.write(self._fd, piece)
            digest.update(piece)
        self._disk.write(self._fd, bytes(-self.size % _BLOCK))
        os.lseek(self._fd, header_at, os.SEEK_SET)
        self._disk.write(self._fd, header(f"{self._top}/{name}", self.size))
        os.lseek(self._fd, 0, os.SEEK_END)
        self._sums.append(sum_line(digest.hexdigest(), name))

    def close(self) -> None:
        """The sums and the end."""
        sums = b"".join(self._sums)
        self._disk.write(self._fd, [header(f"{self._top}/{SUMS}", len(sums)), sums, bytes(-len(sums) % _BLOCK), _END])


class ArchiveReader:
    """Reads an archive once, in order, believing nothing.

    Raises `ArchiveRefused` for what no exporter of ours writes, `Damaged` for what is cut or was changed.
    `name` is what it is called in messages.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._size = os.fstat(fd).st_size
        self._at = 0
        self._sums = hashlib.sha256()
        self._sums_bytes = 0
        self._top = ""
        self._member: Member | None = None
        self._names: set[str] = set()
        self.about = self._read_about()

    def members(self) -> Iterator[Member]:
        """Each member behind the first; when it has ended, all sums were right and nothing follows."""
        while True:
            member = self._next()
            if member.name == SUMS:
                self._check_end(member)
                return
            if not NAME.match(member.name) or member.name in self._names:
                raise self.refused(f"{member.name!r} does not belong into one, or is there twice")
            self._names.add(member.name)
            yield member
            member.finish()

    def refused(self, why: str) -> ArchiveRefused:
        return ArchiveRefused(
            f"{self._name} is no archive of a session that can be imported: {why}; nothing was imported"
        )

    def damaged(self, at: int, why: str) -> Damaged:
        return Damaged(f"{self._name} is damaged at byte {at}: {why}; {_ADVICE}", path=self._name, offset=at)

    def _read_about(self) -> About:
        member = self._next()
        if member.name != ABOUT or member.size > _ABOUT_MOST_BYTES:
            raise self.refused(f"it does not begin with {ABOUT}")
        raw = b"".join(member)
        member.finish()
        self._names.add(ABOUT)
        try:
            fields = strict_json.loads_object(raw, ABOUT)
            version = fields.pop("format", None)
            if type(version) is int and version > FORMAT:
                raise self.refused(f"it has format {version}; this version of openjobs reads up to {FORMAT}")
            known: dict[str, Any] = {name: fields.get(name) for name in attrs.fields_dict(About)}
            about = About(**known)
        except (Damaged, TypeError) as error:
            raise self.refused(f"{ABOUT} cannot be read ({error})") from None
        if version != FORMAT or not _is_sound(about) or about.session_id != self._top:
            raise self.refused(f"{ABOUT} says what no exporter says")
        return about

    def _next(self) -> Member:
        at = self._at
        block = self._read(at, _BLOCK)
        if len(block) < _BLOCK:
            raise self.damaged(at, "it is cut") if at else self.refused("it is too short")
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            sound = 0 <= info.size <= MEMBER_MOST_BYTES and header(info.name, info.size) == block
        except (tarfile.HeaderError, ValueError, InvalidInput):
            sound = False
        top, _, name = info.name.partition("/") if sound else ("", "", "")
        if not sound:
            raise (
                self.damaged(at, "a member's header is not one of ours")
                if at
                else self.refused("its first member is foreign")
            )
        if not name or not is_session_id(top) or self._top not in ("", top):
            raise self.refused(f"{info.name!r} does not belong into one")
        self._top = top
        if at + _BLOCK + info.size > self._size:
            raise self.damaged(self._size, "it is cut")
        self._at = at + _BLOCK
        self._member = Member(self, name, info.size)
        return self._member

    def _check_end(self, member: Member) -> None:
        at, expected, size = self._at, self._sums.digest(), self._sums_bytes
        if member.size != size or hashlib.sha256(self._read(at, size)).digest() != expected:
            raise self.damaged(at, "the checksums are not those of what is in it")
        self._at += size
        self._skip_filling(size)
        if self._read(self._at, len(_END) + 1) != _END:
            raise self.damaged(self._at, "it does not end where an archive ends")

    def _read(self, at: int, size: int) -> bytes:
        pieces = []
        while size > 0 and (piece := os.pread(self._fd, min(size, _PIECE_BYTES), at)):
            pieces.append(piece)
            at, size = at + len(piece), size - len(piece)
        return b"".join(pieces)

    def _take(self, size: int) -> bytes:
        piece = os.pread(self._fd, min(size, _PIECE_BYTES), self._at)
        if not piece:
            raise self.damaged(self._at, "it is cut")
        self._at += len(piece)
        return piece

    def _skip_filling(self, size: int) -> None:
        filling = -size % _BLOCK
        if self._read(self._at, filling) != bytes(filling):
            raise self.damaged(self._at, "there is something between two members")
        self._at += filling

    def _add_sum(self, name: str, digest: str) -> None:
        line = sum_line(digest, name)
        self._sums.update(line)
        self._sums_bytes += len(line)


class Member:
    """One file in the archive, to be read once: as pieces, or with `read`."""

    def __init__(self, reader: ArchiveReader, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._reader = reader
        self._left = size
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        if not self._left:
            return b""
        piece = self._reader._take(min(size, self._left))
        self._digest.update(piece)
        self._left -= len(piece)
        return piece

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read(_PIECE_BYTES):
            yield piece

    def finish(self) -> None:
        """Read what nobody read; after this the next member follows."""
        for _ in self:
            pass
        self._reader._skip_filling(self.size)
        self._reader._add_sum(self.name, self._digest.hexdigest())


def _is_sound(about: About) -> bool:
    texts: list[Any] = [about.session_id, about.commit_id, about.branch, about.exported_at, about.openjobs]
    counts: list[Any] = [about.jobs, about.unfinished_jobs, about.unfinished_tasks]
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(count) is int and count >= 0 for count in counts)
        and re.fullmatch(r"[0-9a-f]{40}", about.commit_id) is not None
    )
