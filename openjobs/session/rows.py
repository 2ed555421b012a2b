"""A row: one job as `jobs.json` holds it. Source: spec 003, D1 and D4.

Between a `Job` and its row two things differ: a row keeps only the beginnings of long texts (the
names of those that were cut stand in `cut`), and a row written by a newer version may have fields
that this version does not know, which `Job.extra` carries from reading to writing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, get_args, get_type_hints

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError
from cattrs.fns import identity
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from ..clock import from_text, to_text
from ..errors import Damaged, UnknownStatus
from ..jobs import Job, JobStatus
from . import strict_json
from .text import beginning, fits, storable

#: texts of which a row may hold only the beginning
PROMPT = "description"
LONG_TEXTS = (PROMPT, "result_text", "error")
CUT = "cut"

_FIELDS = [field.name for field in attrs.fields(Job) if field.name != "extra"]
#: what JSON has, and nothing
_PLAIN = frozenset({str, int, float, bool, type(None)})
#: the fields of D1 stand in every row, empty or not; the others only where they say something
_ALWAYS = frozenset(_FIELDS[: _FIELDS.index("attempt") + 1])


def _converter() -> Converter:
    converter = Converter(detailed_validation=True)
    converter.register_unstructure_hook(datetime, to_text)
    converter.register_structure_hook(datetime, lambda value, _: from_text(value))
    kinds = get_type_hints(Job)
    overrides = {
        name: override(
            omit_if_default=name not in _ALWAYS,
            # Said here, since cattrs would call a function of its own for each optional text.
            unstruct_hook=identity if _PLAIN.issuperset(get_args(kinds[name]) or (None,)) else None,
        )
        for name in _FIELDS
    } | {"extra": override(omit=True)}
    converter.register_unstructure_hook(
        Job,
        make_dict_unstructure_fn(Job, converter, _cattrs_omit_if_default=False, **overrides),  # type: ignore[arg-type]
    )
    converter.register_structure_hook(Job, make_dict_structure_fn(Job, converter, extra=override(omit=True)))
    return converter


_CONVERTER = _converter()


def encode(job: Job) -> tuple[bytes, bool]:
    """The row as canonical JSON, one line; and whether it holds every text whole."""
    row: dict[str, Any] = _CONVERTER.unstructure(job)
    before = job.extra.get(CUT, ())
    cut = [name for name in LONG_TEXTS if name in before or not fits(row[name])]
    for name in cut:
        row[name] = beginning(row[name] or "")
    if cut:
        row[CUT] = cut
    for name, value in job.extra.items():
        if name != CUT:
            row.setdefault(name, value)
    try:
        return strict_json.dumps(row), not cut
    except TypeError:  # a lone surrogate somewhere
        return strict_json.dumps({k: storable(v) if isinstance(v, str) else v for k, v in row.items()}), False


def decode(job_id: str, raw: bytes, path: str, offset: int = 0) -> Job:
    """The job with its texts as far as the row holds them; `extra["cut"]` names those that are not whole.

    Raises `Damaged`, and `UnknownStatus` with the status as it stands there.
    """
    row = strict_json.loads_object(raw, path, offset)
    status = row.get("status")
    if status not in JobStatus.__members__.values():
        raise UnknownStatus(
            f"{path}: job {job_id} has the status {status!r}, which this version does not know;"
            " it was probably written by a newer one",
            path=path,
            offset=offset,
            status=str(status),
        )
    extra = {name: row.pop(name) for name in [name for name in row if name not in _KNOWN]}
    try:
        job: Job = _CONVERTER.structure(row, Job)
    except (ClassValidationError, ValueError, TypeError, KeyError) as error:
        raise Damaged(
            f"{path}: the row of job {job_id} cannot be read: {_why(error)}", path=path, offset=offset
        ) from None
    if job.job_id != job_id:
        raise Damaged(f"{path}: the row of job {job_id} says it is {job.job_id}", path=path, offset=offset)
    return attrs.evolve(job, extra=extra) if extra else job


_KNOWN = frozenset(_FIELDS)


def cut_texts(job: Job) -> tuple[str, ...]:
    """The names of the texts that a decoded row holds only in part."""
    names = job.extra.get(CUT, ())
    return tuple(name for name in LONG_TEXTS if name in names)


def with_prompt_of(job: Job, known: Job) -> Job:
    """`job` with the prompt of `known`, the same job, where only its beginning could be read."""
    if PROMPT not in job.extra.get(CUT, ()) or PROMPT in known.extra.get(CUT, ()):
        return job
    cut = [name for name in job.extra[CUT] if name != PROMPT]
    extra = {name: value for name, value in job.extra.items() if name != CUT} | ({CUT: cut} if cut else {})
    return attrs.evolve(job, description=known.description, extra=extra)


def _why(error: BaseException) -> str:
    if isinstance(error, ClassValidationError):
        return "; ".join(_why(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"
