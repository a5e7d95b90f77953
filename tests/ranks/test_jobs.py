"""What a job leaves in shared memory is told from what other jobs still use."""

import multiprocessing
import uuid

from jobs import SHARED_MEMORY, shared_memory, unmapped


def test_a_leftover_is_found():
    left = SHARED_MEMORY / f"fsdprl_left_{uuid.uuid4().hex}"
    left.write_bytes(b"x")
    try:
        assert unmapped({left.name}) == {left.name}
    finally:
        left.unlink()


def test_a_semaphore_of_a_living_process_is_no_leftover():
    """Its own maps name the passing file that it was made under, not the name that it has."""
    before = shared_memory()
    lock = multiprocessing.get_context("forkserver").Lock()
    try:
        made = shared_memory().keys() - before
        assert made
        assert not unmapped(set(made))
    finally:
        del lock
