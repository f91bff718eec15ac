"""Locks: one holder at a time, freed with its process, and never removed from under a holder."""

import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from advnorm._core.locks import Busy, exclusive, is_held, lock_path
from support.problems import raises_problem
from support.time_limit import time_limit


def test_a_file_and_a_folder_are_held_by_one_at_a_time(tmp_path):
    for target in (tmp_path, tmp_path / "deep" / "record.json"):
        assert not is_held(target)
        with exclusive(target):
            assert is_held(target)
            with raises_problem("busy", str(target), Busy), exclusive(target):
                pass
            assert is_held(target)
        assert not is_held(target) and not lock_path(target).exists()
    with exclusive(None):
        pass


def test_a_lock_that_is_not_a_regular_file_does_not_block(tmp_path):
    os.mkfifo(lock_path(tmp_path))
    with time_limit(5):
        assert not is_held(tmp_path)
        with exclusive(tmp_path):
            assert is_held(tmp_path)


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Between opening the file and locking it, the last holder removes it: the lock of a nameless file binds nobody."""
    target, path = tmp_path / "r.json", tmp_path / "r.json.lock"
    flock, calls = fcntl.flock, []

    def removed_first(handle, operation):
        if not calls:
            path.unlink()
        calls.append(operation)
        return flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with exclusive(target):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(Busy), exclusive(target):
            pass


def test_a_holder_that_ends_does_not_remove_the_file_of_the_next_one(tmp_path, monkeypatch):
    """Another process takes the lock in the moment of its release. Its file must stay, or a third could lock too."""
    target, close, others = tmp_path / "r.json", os.close, []

    def taken_at_once(handle):
        close(handle)
        if not others:
            others.append(os.open(lock_path(target), os.O_RDWR | os.O_CREAT))
            fcntl.flock(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(os, "close", taken_at_once)
    with exclusive(target):
        pass
    assert os.path.samestat(os.fstat(others[0]), os.stat(lock_path(target)))
    with pytest.raises(Busy), exclusive(target):
        pass
    close(others[0])


def test_many_threads_never_hold_one_lock_together(tmp_path):
    inside, most, done = 0, 0, 0

    def work():
        nonlocal inside, most, done
        for _ in range(50):
            try:
                with exclusive(tmp_path / "r.json"):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
                    done += 1
            except Busy:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and done > 50


def test_a_place_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with raises_problem("not_writable"), exclusive(tmp_path / "file" / "r.json"):
        pass


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path):
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom advnorm._core.locks import exclusive\n"
        "with exclusive(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n        os.close(1)\n        time.sleep(30)\n        os._exit(0)\n"
        "    print(os.getpid(), flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert parent.communicate(timeout=60)[0].strip() == str(parent.pid).encode()
        assert not is_held(tmp_path)
        with exclusive(tmp_path):
            pass
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
