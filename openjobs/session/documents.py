"""The documents of one session at one version: read them, change them, and hand over what changed.

Pure over path -> bytes: it reads a `View` and ends in a mapping of changed files. One `Documents`
lives for one transaction or one reading; what is worth keeping between them is in `Memory`.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..errors import Damaged, UnknownNode
from ..jobs import TERMINAL, Job, JobStatus, NoticeStage
from ..repo import View
from . import history, meta, pages, strict_json
from .catalog import Catalog, Entries
from .history import Node, Segment
from .meta import Meta
from .pages import Page
from .rows import CUT, PROMPT, cut_texts

#: a job's status in a catalog tag
STATUS_TAG = {status: number for number, status in enumerate(JobStatus, start=1)}
UNKNOWN_TAG = 0
_TAG_OF = {status.value: tag for status, tag in STATUS_TAG.items()}
#: added to the tag of an ended job whose notice is on its way
_NOTICE_TAG = {NoticeStage.RECORDED: 8, NoticeStage.DELIVERED: 16}
_NOTICE_MARK = {stage: b'"notice":"%s"' % stage.value.encode() for stage in _NOTICE_TAG}

_PARSED_LIMIT = 12
_PLACES_LIMIT = 4096
#: what is kept of a session that nobody has used for a while: `meta.json`, the newest page, the open segment
_RESTING_PARSED = 3
_RESTING_PLACES = 128


class Memory:
    """What is kept of a session between readings. Everything in it is checked before it is believed.

    What the lock protects: all of it. It is held for one lookup or one reading, never while waiting.
    """

    def __init__(self, private: Path | None = None) -> None:
        self.lock = threading.RLock()
        self._parsed: OrderedDict[str, tuple[bytes, Any]] = OrderedDict()
        self.job_pages: OrderedDict[str, int] = OrderedDict()
        self.node_segments: OrderedDict[str, int] = OrderedDict()
        #: the highest page and segment met so far, where looking for a higher one begins
        self.last_page = -1
        self.last_segment = -1
        self.jobs = Catalog(
            pages.OLDER, pages.number_of, _page_entries, private / "jobs.catalog" if private is not None else None
        )
        self.nodes = Catalog(
            history.HISTORY,
            history.number_of,
            _segment_entries,
            private / "nodes.catalog" if private is not None else None,
        )

    def parsed(self, path: str, data: bytes) -> Any | None:
        with self.lock:
            found = self._parsed.get(path)
            if found is None or (found[0] is not data and found[0] != data):
                return None
            self._parsed.move_to_end(path)
            return found[1]

    def keep(self, path: str, data: bytes, value: Any) -> None:
        with self.lock:
            self._parsed[path] = (data, value)
            self._parsed.move_to_end(path)
            _keep_last(self._parsed, _PARSED_LIMIT)

    def remember(self, places: OrderedDict[str, int], item_id: str, number: int) -> None:
        with self.lock:
            places[item_id] = number
            places.move_to_end(item_id)
            _keep_last(places, _PLACES_LIMIT)

    def rest(self) -> None:
        """Keep little more than what the next small change needs."""
        with self.lock:
            _keep_last(self._parsed, _RESTING_PARSED)
            _keep_last(self.job_pages, _RESTING_PLACES)
            _keep_last(self.node_segments, _RESTING_PLACES)


def _keep_last(kept: OrderedDict[str, Any], limit: int) -> None:
    while len(kept) > limit:
        kept.popitem(last=False)


def _page_entries(view: View, number: int) -> Entries:
    path = pages.older_path(number)
    page = Page.parse(path, view.read(path))
    return list(page.lines), page_tags(page)


def page_tags(page: Page) -> bytes:
    """One tag a row, of status and notice; `UNKNOWN_TAG` for a row that this version cannot read."""
    tags = bytes(_TAG_OF.get(status or "", UNKNOWN_TAG) for status in page.statuses())
    for stage, mark in _NOTICE_MARK.items():
        if mark in page.data:
            more = _NOTICE_TAG[stage]
            tags = bytes(
                tag + more if tag and mark in line else tag for tag, line in zip(tags, page.lines.values(), strict=True)
            )
    return tags


def _tags_of(statuses: Collection[JobStatus]) -> list[int]:
    """Every tag that a row with one of these statuses may have, and that of a row nobody can read."""
    tags = [UNKNOWN_TAG, *(STATUS_TAG[status] for status in statuses)]
    return tags + [tag + more for tag in tags[1:] for more in (8, 16, 24)]


def _segment_entries(view: View, number: int) -> Entries:
    path = history.segment_path(number)
    segment = Segment.parse(path, view.read(path))
    told = [_told(event_id) for notice in segment.notices() for event_id in history.events_of(notice)]
    return [*segment.places, *(_beside(parent) for parent in segment.card_parents()), *told], b""


def _beside(parent: str) -> str:
    """The key under which a segment with a card on that message is found; no message id has an `@` in front."""
    return "@" + parent


def _told(event_id: str) -> str:
    """The key under which a segment with a notice of that end is found; no message id has a `!` in front."""
    return "!" + event_id


class Documents:
    """One session at one version. Raises `Damaged` for what cannot be read.

    A document that is changed is parsed once, changed in memory, and appears in `changes`.
    """

    def __init__(self, view: View, memory: Memory) -> None:
        self._view = view
        self._memory = memory
        self._changed: dict[str, bytes] = {}
        #: what was parsed or made here: one version is read, so it cannot have changed
        self._now: dict[str, Any] = {}

    @property
    def commit_id(self) -> str | None:
        return self._view.commit_id

    @property
    def changes(self) -> dict[str, bytes]:
        return self._changed

    # --- meta ---

    def meta(self) -> Meta:
        found: Meta = self._parsed(meta.PATH, lambda path, data: meta.decode(data))
        return found

    def put_meta(self, value: Meta) -> None:
        self._put(meta.PATH, meta.encode(value), value)

    # --- rows ---

    def newest_page(self) -> Page:
        return self._page(pages.NEWEST)

    def older_page(self, number: int) -> Page:
        return self._page(pages.older_path(number))

    def older_pages(self) -> int:
        """How many closed pages there are (one more than the highest number)."""
        last = self._memory.last_page = self._last(
            self._memory.last_page, pages.older_path, pages.OLDER, pages.number_of
        )
        return last + 1

    def _page(self, path: str) -> Page:
        found: Page = self._parsed(path, Page.parse)
        return found

    def job(self, job_id: str) -> Job | None:
        page = self._page_of(job_id)
        return None if page is None else page.get(job_id)

    def _page_of(self, job_id: str) -> Page | None:
        damage: Damaged | None = None
        try:
            newest = self.newest_page()
            if job_id in newest:
                return newest
        except Damaged as error:
            damage = error  # a job is in one page only: it may be in another
        with self._memory.lock:
            hint = self._memory.job_pages.get(job_id)
        if hint is not None and job_id in (page := self.older_page(hint)):
            return page
        # A job never leaves its page, so what the catalog knows already needs no look at what is new.
        found = self._page_by_catalog(job_id, sync=False) or self._page_by_catalog(job_id, sync=True)
        if found is None and damage is not None:
            raise damage
        return found

    def _page_by_catalog(self, job_id: str, *, sync: bool) -> Page | None:
        with self._memory.lock:
            if sync:
                self._memory.jobs.sync(self._view)
            numbers = list(self._memory.jobs.find(job_id))
            if sync:
                numbers += self._memory.jobs.unreadable()
        for number in numbers:
            if job_id in (page := self.older_page(number)):
                self._memory.remember(self._memory.job_pages, job_id, number)
                return page
        return None

    def job_of_call(self, origin_tool_call_id: str, among: int) -> Job | None:
        """The job of that tool call among the newest rows: `among` of them at least, or those after a closed page
        that cannot be read (no job of this batch is in it, or was made before those in it)."""
        needle = b'"origin_tool_call_id":' + strict_json.dumps(origin_tool_call_id)
        page, number = self.newest_page(), self.older_pages()
        while True:
            if needle in page.data:
                for job_id, line in page.lines.items():
                    job = page.get(job_id) if needle in line else None
                    if job is not None and job.origin_tool_call_id == origin_tool_call_id:
                        return job
            among -= len(page)
            number -= 1
            if among <= 0 or number < 0:
                return None
            try:
                page = self.older_page(number)
            except Damaged:
                return None

    def put_job(self, job: Job) -> None:
        """Change the row where it stands, or add it to the newest page."""
        page = (self._page_of(job.job_id) if job.revision else None) or self.newest_page()
        self._put_page(page.put(job))

    def _put_page(self, page: Page) -> None:
        self._put(page.path, page.data, page)

    def close_page_if_full(self) -> bool:
        """Move a full newest page among the older ones, whole. True when it was moved."""
        newest = self.newest_page()
        number = self.older_pages() if newest.is_full(0) else 0
        if not newest.is_full(number):
            return False
        with self._memory.lock:  # so that no later search has more than this page to read
            self._memory.jobs.sync(self._view)
        self._put_page(Page(pages.older_path(number), newest.lines, newest.data))
        self._put_page(Page(pages.NEWEST, {}))
        for job_id in newest.lines:
            self._memory.remember(self._memory.job_pages, job_id, number)
        return True

    def jobs_newest_first(
        self, statuses: frozenset[JobStatus] | None = None, on_damage: Callable[[Damaged], object] | None = None
    ) -> Iterator[Job]:
        """All rows, newest first; pages without any of `statuses` are passed over unread. A page or a row that
        cannot be read is told to `on_damage` and passed over; without it, it is raised."""
        tell = on_damage or _raise
        older = (pages.older_path(number) for number in self._numbers(statuses))
        for path in itertools.chain([pages.NEWEST], older):
            try:
                page = self._page(path)
            except Damaged as error:
                tell(error)
                continue
            for job_id in reversed(list(page.lines)):
                try:
                    job = page.get(job_id)
                except Damaged as error:
                    tell(error)
                    continue
                if job is not None and (statuses is None or job.status in statuses):
                    yield job

    def _numbers(self, statuses: frozenset[JobStatus] | None) -> Iterator[int]:
        if statuses is None:
            yield from range(self.older_pages() - 1, -1, -1)
            return
        with self._memory.lock:
            self._memory.jobs.sync(self._view)
            numbers = list(self._memory.jobs.tagged(_tags_of(statuses)))
        yield from numbers

    def jobs_noticed(self, stage: NoticeStage, on_damage: Callable[[Damaged], object] | None = None) -> Iterator[Job]:
        """The ended jobs whose notice is at `stage` (recorded or delivered), newest first; other pages stay unread.
        A page or a row that cannot be read is told to `on_damage` and passed over; without it, it is raised."""
        mark, more = _NOTICE_MARK[stage], _NOTICE_TAG[stage]
        tell = on_damage or _raise
        newest: Page | None = None
        try:
            newest = self.newest_page()
        except Damaged as error:
            tell(error)
        if newest is not None and mark in newest.data:
            yield from _at_stage(newest, mark, stage, tell)
        if not self.older_pages():
            return
        with self._memory.lock:
            self._memory.jobs.sync(self._view)
            tags = [STATUS_TAG[status] + more for status in TERMINAL]
            # 24: a row whose other fields hold the mark of the other stage
            tags += [STATUS_TAG[status] + 24 for status in TERMINAL]
            numbers = list(self._memory.jobs.tagged([*tags, UNKNOWN_TAG]))
        for number in numbers:
            try:
                page = self.older_page(number)
            except Damaged as error:
                tell(error)
                continue
            yield from _at_stage(page, mark, stage, tell)

    # --- nodes ---

    def append(self, nodes: Sequence[Node]) -> None:
        segment, number = self._open_segment()
        segment = segment.append(list(nodes))
        self._put(segment.path, segment.data, segment)
        for node in nodes:
            self._memory.remember(self._memory.node_segments, node.id, number)

    def _open_segment(self) -> tuple[Segment, int]:
        number = max(self._last_segment(), 0)
        try:
            segment = self._segment(number)
            closed = segment.is_full(number)
        except Damaged:  # left as it is, as any other that is damaged: what comes now stands in the next
            closed = True
        if closed:
            number += 1
            with self._memory.lock:
                self._memory.nodes.sync(self._view, closed_only_below=number)
            segment = self._segment(number)
        return segment, number

    def _segment(self, number: int) -> Segment:
        found: Segment = self._parsed(history.segment_path(number), Segment.parse)
        return found

    def find_node(self, node_id: str) -> Node | None:
        """The newest version of a message, or None."""
        last = self._last_segment()
        if last < 0 and not self._changed:
            return None
        for number in range(max(last, 0) + 1, max(last, 0) - 1, -1):  # a transaction may have opened one more
            if (node := self._segment(number).get(node_id)) is not None:
                return node
        with self._memory.lock:
            hint = self._memory.node_segments.get(node_id)
            self._memory.nodes.sync(self._view, closed_only_below=last)
            numbers = [] if hint is None else [hint]
            numbers += self._memory.nodes.find(node_id)
            numbers += self._memory.nodes.unreadable()  # a newer version may be in one of these
        for number in sorted(set(numbers), reverse=True):
            if number <= last and (node := self._segment(number).get(node_id)) is not None:
                self._memory.remember(self._memory.node_segments, node_id, number)
                return node
        return None

    def has_node(self, node_id: str) -> bool:
        """Whether the session has that message; cheap for one that was met lately."""
        with self._memory.lock:
            hint = self._memory.node_segments.get(node_id)
        if hint is not None and node_id in self._segment(hint):
            return True
        return self.find_node(node_id) is not None

    def node(self, node_id: str) -> Node:
        found = self.find_node(node_id)
        if found is None:
            raise UnknownNode(f"there is no message {node_id} in this session", candidates=())
        return found

    def cards_on(self, node_ids: Collection[str]) -> list[Node]:
        """The newest version of each attach card that hangs on one of these messages, in order of creation."""
        last = max(self._last_segment(), 0)
        with self._memory.lock:
            self._memory.nodes.sync(self._view, closed_only_below=last)
            numbers = {n for node_id in node_ids for n in self._memory.nodes.find(_beside(node_id)) if n < last}
            numbers.update(self._memory.nodes.unreadable())
        newest: dict[str, Node] = {}
        for number in [*sorted(numbers), last, last + 1]:
            for card in self._segment(number).cards():
                if card.parent in node_ids:
                    newest[card.id] = card
        return list(newest.values())

    def notice_of(self, event_id: str) -> Node | None:
        """The message that tells of that end, or None: nobody was told."""
        last = max(self._last_segment(), 0)
        for number in (last + 1, last):  # a transaction may have opened one more
            if (node := self._notice_in(number, event_id)) is not None:
                return node
        with self._memory.lock:
            self._memory.nodes.sync(self._view, closed_only_below=last)
            numbers = [n for n in self._memory.nodes.find(_told(event_id)) if n < last]
            numbers += self._memory.nodes.unreadable()
        for number in numbers:
            if (node := self._notice_in(number, event_id)) is not None:
                return node
        return None

    def _notice_in(self, number: int, event_id: str) -> Node | None:
        segment = self._segment(number)
        if event_id.encode() not in segment.data:
            return None
        return next((node for node in segment.notices() if event_id in history.events_of(node)), None)

    def segments(self) -> Iterator[Segment]:
        """All segments, oldest first."""
        for number in range(self._last_segment() + 1):
            yield self._segment(number)

    # --- whole jobs ---

    def whole(self, job: Job) -> Job:
        """`job` with its long texts joined again from the nodes that hold them."""
        job = self.outcome(job)
        if job.user_msg_id is not None and PROMPT in cut_texts(job):
            self.node(job.user_msg_id)  # says why it could not be read
        return job

    def outcome(self, job: Job) -> Job:
        """As `whole`, but a prompt that cannot be read stays as far as the row has it, and is named in `extra["cut"]`:
        what is to become of a job, and what became of it, does not depend on it."""
        cut = cut_texts(job)
        if not cut:
            return job
        texts: dict[str, Any] = {}
        left: list[str] = []
        if PROMPT in cut and job.user_msg_id is not None:
            try:
                texts[PROMPT] = self.node(job.user_msg_id).content
            except (Damaged, UnknownNode):
                left.append(PROMPT)
        holder = job.result_msg_id or job.head_id
        if holder is not None and ("result_text" in cut or "error" in cut):
            node = self.node(holder)
            if "result_text" in cut:
                texts["result_text"] = node.content
            if "error" in cut:
                texts["error"] = node.extra.get("error", job.error)
        extra = {name: value for name, value in job.extra.items() if name != CUT}
        return attrs.evolve(job, extra={**extra, CUT: left} if left else extra, **texts)

    def _last_segment(self) -> int:
        """The number of the open segment, -1 while there is none."""
        memory = self._memory
        memory.last_segment = self._last(memory.last_segment, history.segment_path, history.HISTORY, history.number_of)
        return memory.last_segment

    def _last(
        self, known: int, path_of: Callable[[int], str], directory: str, number_of: Callable[[str], int | None]
    ) -> int:
        """The highest number in this view: two looks where it is the one that was known, a listing otherwise."""
        view = self._view
        if known >= 0 and view.version(path_of(known + 1)) is None and view.version(path_of(known)) is not None:
            return known
        return _last_number(view, directory, number_of)

    def _parsed(self, path: str, parse: Callable[[str, bytes | None], Any]) -> Any:
        found = self._now.get(path)
        if found is not None:
            return found
        data = self._changed.get(path) or self._view.read(path)
        if data is None:
            return parse(path, None)
        found = self._memory.parsed(path, data)
        if found is None:
            found = parse(path, data)
            self._memory.keep(path, data, found)
        if len(self._now) >= _PARSED_LIMIT:
            self._now.clear()  # a look at everything must not hold everything
        self._now[path] = found
        return found

    def _put(self, path: str, data: bytes, value: Any) -> None:
        self._memory.keep(path, data, value)
        self._now[path] = value
        self._changed[path] = data


def _at_stage(page: Page, mark: bytes, stage: NoticeStage, tell: Callable[[Damaged], object]) -> Iterator[Job]:
    for job_id, line in reversed(list(page.lines.items())):
        if mark in line:
            try:
                job = page.get(job_id)
            except Damaged as error:
                tell(error)
                continue
            if job is not None and job.notice == stage and job.terminal:
                yield job


def _raise(error: Damaged) -> None:
    raise error


def _last_number(view: View, directory: str, number_of: Callable[[str], int | None]) -> int:
    """The highest block number below `directory`, -1 where there is none. By name 10000 comes before 9999."""
    for sub in sorted(view.names(directory), key=lambda name: (len(name), name), reverse=True):
        numbers = [number for name in view.names(f"{directory}/{sub}") if (number := number_of(name)) is not None]
        if numbers:
            return max(numbers)
    return -1
