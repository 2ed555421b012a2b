"""The few effects that everything durable is made of."""

from .disk import Disk
from .lease import Lease, is_held, remove_if_free
from .lock import FileLock, is_locked

__all__ = ["Disk", "FileLock", "Lease", "is_held", "is_locked", "remove_if_free"]
