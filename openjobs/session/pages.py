"""Pages of rows. `jobs.json` is the newest page; older ones lie under `jobs/`, in order of creation.

A page is `{job_id: row}` with one row on each line, so that `git log -p` shows a transition as one
changed line. A row never moves from page to page again once its page was closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..errors import Damaged
from ..ids import SESSION_ID_CHARS
from ..jobs import Job
from . import blocks, rows, strict_json

NEWEST = "jobs.json"
OLDER = "jobs"
#: a page is closed when it has this many rows or bytes, or a multiple of them (`blocks.scale`)
PAGE_ROWS = 32
PAGE_BYTES = 32 * 1024

#: a session's name stands in a row as its own and as its caller's
_NAMES_IN_A_ROW = 2

_LINE = re.compile(rb'("([0-9A-Za-z_.:@-]+)":\{.*\})(,?)\Z')
_STATUS = re.compile(rb'"status":"([a-z]+)"')
_NAME = re.compile(r"(\d{4,})\.json\Z")


class Page:
    """An immutable page. Rows are kept as the bytes they were read as, and decoded only when asked for.

    So a row that cannot be understood is kept as it is while another row of the page is changed.
    """

    __slots__ = ("_known", "data", "lines", "path")

    def __init__(
        self,
        path: str,
        lines: Mapping[str, bytes],
        data: bytes | None = None,
        known: Mapping[str, Job] | None = None,
    ) -> None:
        self.path = path
        #: job id -> `"<job id>":<row>`
        self.lines = lines
        self.data = data if data is not None else _join(lines)
        #: unfinished jobs that were put here, so that their next event need not decode them
        self._known = known or {}

    @classmethod
    def parse(cls, path: str, data: bytes | None) -> Page:
        """Raises `Damaged` with the offset. No file is an empty page; an empty file is not."""
        if data is None:
            return cls(path, {}, b"")
        lines = _split(data)
        if lines is None:
            lines = _reparse(path, data)
        return cls(path, lines, data)

    def __len__(self) -> int:
        return len(self.lines)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.lines

    def get(self, job_id: str) -> Job | None:
        known = self._known.get(job_id)
        if known is not None:
            return known
        line = self.lines.get(job_id)
        if line is None:
            return None
        row = line[len(job_id.encode()) + 3 :]
        return rows.decode(job_id, row, self.path, max(self.data.find(row), 0))

    def jobs(self) -> Iterator[Job]:
        """In order of creation."""
        for job_id in self.lines:
            job = self.get(job_id)
            assert job is not None
            yield job

    def statuses(self) -> Iterator[str | None]:
        """The status of each row as it stands there; None where the row cannot be read."""
        for job_id, line in self.lines.items():
            # In a row of ours `status` comes before anything that could hold a key of that name, and
            # inside a JSON string its quotes would be escaped.
            if (found := _STATUS.search(line)) is not None and line.startswith(b'{"job_id":', len(job_id.encode()) + 3):
                yield found[1].decode()
                continue
            try:
                job = self.get(job_id)
                yield job.status.value if job is not None else None
            except Damaged:
                yield None

    def put(self, job: Job) -> Page:
        row, whole = rows.encode(job)
        known = {job_id: each for job_id, each in self._known.items() if job_id != job.job_id}
        if whole and not job.terminal:
            known[job.job_id] = job
        line = b'"%s":%s' % (job.job_id.encode(), row)
        return Page(self.path, {**self.lines, job.job_id: line}, known=known)

    def is_full(self, number: int) -> bool:
        """Whether it is large enough to be closed as older page `number`."""
        scale = blocks.scale(number)
        return len(self.lines) >= scale * PAGE_ROWS or len(self.data) >= scale * PAGE_BYTES

    def was_full(self, number: int) -> bool:
        """Whether it may have been so when it was closed. Only an import under a shorter name makes rows smaller."""
        most = len(self.data) + len(self.lines) * _NAMES_IN_A_ROW * (SESSION_ID_CHARS - 1)
        return self.is_full(number) or most >= blocks.scale(number) * PAGE_BYTES


def _join(lines: Mapping[str, bytes]) -> bytes:
    if not lines:
        return b"{}\n"
    return b"{\n" + b",\n".join(lines.values()) + b"\n}\n"


def _split(data: bytes) -> dict[str, bytes] | None:
    """The rows of a page in the form in which we write it; None where it has another form."""
    if data == b"{}\n":
        return {}
    if not (data.startswith(b"{\n") and data.endswith(b"\n}\n")):
        return None
    found: dict[str, bytes] = {}
    parts = data[2:-3].split(b"\n")
    for number, part in enumerate(parts):
        match = _LINE.match(part)
        if match is None or bool(match[3]) != (number < len(parts) - 1):
            return None
        job_id = match[2].decode()
        if job_id in found:
            return None
        found[job_id] = match[1]
    return found


def _reparse(path: str, data: bytes) -> dict[str, bytes]:
    """The rows of a page that somebody else wrote (another layout of the same JSON)."""
    whole = strict_json.loads_object(data, path)
    found = {}
    for job_id, row in whole.items():
        if not isinstance(row, dict):
            raise Damaged(f"{path}: the row of job {job_id} is not an object", path=path, offset=0)
        found[job_id] = strict_json.dumps(job_id) + b":" + strict_json.dumps(row)
    return found


def older_path(number: int) -> str:
    return blocks.path_of(OLDER, number, ".json")


def number_of(name: str) -> int | None:
    """The number in the file name of an older page; None for a name that is not one."""
    match = _NAME.match(name)
    return int(match[1]) if match else None
