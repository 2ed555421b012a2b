"""How many workers: the argument, else `OPENPROGRAM_JOB_WORKERS`, else four (spec 003, D3)."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidWorkers

VARIABLE = "OPENPROGRAM_JOB_WORKERS"
DEFAULT_WORKERS = 4
MAX_WORKERS = 1024


def workers_from(workers: int | None, environ: Mapping[str, str]) -> int:
    """A whole number from 1 to 1024. Raises `InvalidWorkers`, which names where the value came from."""
    if workers is not None:
        return _checked(workers, f"workers={workers!r}")
    text = environ.get(VARIABLE)
    if text is None or not text.strip():
        return DEFAULT_WORKERS
    named = f"{VARIABLE}={text!r}"
    try:
        return _checked(int(text), named)
    except ValueError as error:
        raise _invalid(named) from error


def _checked(workers: int, named: str) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
        raise _invalid(named)
    return workers


def _invalid(named: str) -> InvalidWorkers:
    return InvalidWorkers(f"{named}: the number of workers must be a whole number from 1 to {MAX_WORKERS}")
