"""Append-only ledgers of facts (`tasks.jsonl`, `events.jsonl`)."""

from .cursor import START, Cursor
from .ledger import Compacted, Exclusive, Ledger, Record

__all__ = ["START", "Compacted", "Cursor", "Exclusive", "Ledger", "Record"]
