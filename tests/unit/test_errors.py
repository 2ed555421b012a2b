"""Errors: each has a message of its own, its facts, and one of three meanings."""

from __future__ import annotations

import pickle

import pytest

from openjobs import errors

ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OpenJobsError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_says_something_and_survives_a_process_boundary(kind: type[errors.OpenJobsError]) -> None:
    """Without a message it says its docstring; facts are attributes, after pickling too."""
    assert str(kind()) == (kind.__doc__ or "").splitlines()[0]
    error = pickle.loads(pickle.dumps(kind("what happened", hint="a fact")))
    assert type(error) is kind
    assert str(error) == "what happened"
    assert error.hint == "a fact"


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_no_error_both_changed_nothing_and_may_have_changed_something(kind: type[errors.OpenJobsError]) -> None:
    """R3: refused, unknown and damaged are three families that never overlap."""
    assert sum(issubclass(kind, family) for family in (errors.Refused, errors.OutcomeUnknown, errors.Damaged)) <= 1


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidInput, ValueError),
        (errors.UnknownJob, LookupError),
        (errors.SessionBusy, TimeoutError),
        (errors.StoreWriteFailed, OSError),
    ],
)
def test_who_does_not_know_openjobs_can_catch_a_builtin(
    kind: type[errors.OpenJobsError], builtin: type[Exception]
) -> None:
    """Each is also what the standard library would have raised."""
    assert issubclass(kind, builtin)
