"""A plain SQLite table, as a careful hand would write it: WAL, `synchronous=FULL`, one commit a transition."""

from __future__ import annotations

import sqlite3
import threading

from .peer import HandMade


class SqliteTable(HandMade):
    title = "plain SQLite table"
    how = "four threads and a queue in process; one connection under a lock"
    durable = "four commits, each synced (WAL, synchronous=FULL)"
    less = "the newest state only: no history, no messages, no recovery, no cancel"

    def prepare(self) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.directory / "jobs.db", check_same_thread=False, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.execute("create table jobs (id text primary key, status text, prompt text, result text)")

    def write(self, job_id: str, status: str, text: str) -> None:
        with self._lock:
            if status == "pending":
                self._db.execute("insert into jobs values (?, ?, ?, '')", (job_id, status, text))
            else:
                self._db.execute("update jobs set status = ?, result = ? where id = ?", (status, text, job_id))

    def read(self, job_id: str) -> str:
        with self._lock:
            found: tuple[str] = self._db.execute("select result from jobs where id = ?", (job_id,)).fetchone()
        return found[0]

    def finish(self) -> None:
        self._db.close()
