"""What a session's documents say of themselves, at one version."""

from __future__ import annotations

import pytest

from openjobs.repo import Change
from openjobs.repo.memory import MemoryRepository
from openjobs.session import Documents, Memory
from openjobs.session.history import segment_path
from openjobs.session.pages import older_path


@pytest.mark.parametrize("highest", [0, 255, 256, 9_999, 10_000, 10_239, 10_240, 25_600])
def test_the_highest_number_is_the_highest_whatever_its_name(highest: int) -> None:
    """Names have four digits or more, directories two: by name 10000 comes before 9999, and 100 before 99."""
    numbers = [number for number in (0, 9_998, 9_999, highest - 1, highest) if 0 <= number <= highest]
    repository = MemoryRepository()
    files = {path_of(number): b"{}\n" for number in numbers for path_of in (older_path, segment_path)}
    repository.transact([lambda view: Change(files=files, subject="many", trailers=[])])
    documents = Documents(repository.view(), Memory())
    assert documents.older_pages() == highest + 1
    assert documents._last_segment() == highest
