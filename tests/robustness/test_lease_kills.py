"""Kills at any moment: a lease is free when its owner is gone, and never before (R5)."""

from __future__ import annotations

import random
import time
from pathlib import Path

from openjobs.durable import Disk, Lease, is_held, remove_if_free
from tests.support.chaos import Chaos
from tests.support.child import forked

DISK = Disk(durable=False)


def test_a_lease_whose_owner_was_killed_at_any_moment_is_free(tmp_path: Path, chaos: Chaos) -> None:
    """The owner dies somewhere between making its lease and giving it back; then it is free and can be removed."""
    moment = random.Random(1)
    for cycle in range(chaos.rounds(100, 3000, "kills")):
        name = f"r{cycle}"

        def own(name: str = name) -> str:
            lease = Lease(tmp_path, name, DISK)
            lease.acquire()
            answer = f"held={is_held(tmp_path, name)}"
            time.sleep(moment.random() / 1000)
            lease.release()
            return answer

        with forked(own) as child:
            time.sleep(moment.random() / 500)
            child.kill()
        assert not is_held(tmp_path, name)
        assert remove_if_free(tmp_path, name, DISK)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
