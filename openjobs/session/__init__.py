"""The documents in a session, as pure code over path -> bytes."""

from .documents import Documents, Memory
from .history import Node
from .meta import Meta
from .pages import Page

__all__ = ["Documents", "Memory", "Meta", "Node", "Page"]
