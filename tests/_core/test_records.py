"""Files that are complete or absent, and digests."""

import errno
import os

import pytest
import torch
from torch import nn

from advnorm._core.locks import lock_path
from advnorm._core.records import (
    NotWritable,
    digest,
    interrupted_write,
    model_fingerprint,
    output_problems,
    read_bytes,
    read_json,
    writable_problems,
    write_atomic,
    write_json,
    writing,
)
from support.problems import raises_problem
from support.time_limit import time_limit


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "r.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(path, b"new")
    assert read_json(path) == {"a": 1} and list(path.parent.iterdir()) == [path]


def test_a_file_and_then_the_name_in_its_folder_are_synced(tmp_path, monkeypatch):
    """A power loss cannot be tested. POSIX promises both only after fsync of the file and then of its folder."""
    path, synced = tmp_path / "r.json", []

    def sync(handle):
        synced.append((os.path.samestat(os.fstat(handle), os.stat(tmp_path)), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomic(path, b"new")
    assert synced == [(False, False), (True, True)]


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    def sync(handle):
        if os.path.samestat(os.fstat(handle), os.stat(tmp_path)):
            raise OSError(errno.EINVAL, "not supported")

    monkeypatch.setattr(os, "fsync", sync)
    write_atomic(tmp_path / "r.json", b"new")
    assert (tmp_path / "r.json").read_bytes() == b"new"


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "r.json"
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        write_atomic(path, b"new")
        assert path.stat().st_mode & 0o777 == mode


def test_the_remainder_of_a_killed_writer_names_its_file(tmp_path):
    assert interrupted_write(tmp_path / ".r.json.123.part") == "r.json"
    assert interrupted_write(tmp_path / "r.json") is None


def test_a_system_error_keeps_the_result(tmp_path):
    with raises_problem("not_writable", "r.json", NotWritable) as caught, writing("r.json", result=5):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.result == 5 and "No space left" in str(caught.value)


def test_a_place_that_cannot_be_written_is_found_before_the_computation(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.json", tmp_path / "file" / "deep" / "r.json"):
        (problem,) = writable_problems(path)
        assert (problem.code, problem.field) == ("not_writable", str(path))
    assert writable_problems(tmp_path / "new" / "r.json") == []


def test_what_is_not_a_regular_file_is_neither_read_nor_replaced(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    (loop := tmp_path / "loop").symlink_to(loop)
    (endless := tmp_path / "endless").symlink_to("/dev/zero")
    (behind := tmp_path / "behind").symlink_to(fifo)
    too_long = tmp_path / ("n" * 300)
    for path in (fifo, loop, endless, behind, tmp_path, too_long, f"{tmp_path}/null\0"):
        with time_limit(2), raises_problem("missing_file", str(path)):
            read_bytes(path)
        assert [problem.code for problem in writable_problems(path)] == ["not_writable"], path
    for path in (fifo, loop, behind, tmp_path, too_long):
        with raises_problem("not_writable"), writing(path):
            write_atomic(path, b"new")
    assert fifo.is_fifo() and loop.is_symlink() and behind.is_symlink() and len(list(tmp_path.iterdir())) == 4


def test_an_output_replaces_only_an_earlier_output(tmp_path):
    path = tmp_path / "out.json"
    assert output_problems(path, lambda _: False) == []
    path.touch()
    assert output_problems(path, lambda _: False) == [], "an empty file holds nothing"
    for content, record in {b'{"by": "me"}': {"by": "me"}, b"no JSON": {}, b"[1]": {}}.items():
        path.write_bytes(content)
        assert output_problems(path, lambda found, own=record: found == own) == []
        (problem,) = output_problems(path, lambda found, own=record: found != own)
        assert (problem.code, problem.field) == ("already_exists", str(path))


def test_a_name_leaves_room_for_what_is_added_to_it(tmp_path):
    assert not writable_problems(tmp_path / ("n" * 200 + ".json"))
    assert writable_problems(tmp_path / ("n" * 240 + ".json"))


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for target in (tmp_path / "elsewhere" / "old.json", tmp_path / "elsewhere" / "new.json"):
        (link := tmp_path / target.name).symlink_to(target)
        if target.stem == "old":
            target.write_text("before")
        assert writable_problems(link) == []
        write_json(link, {"a": 1})
        assert link.is_symlink() and not target.is_symlink() and read_json(target) == {"a": 1}
        assert lock_path(link) == lock_path(target)


def test_a_name_that_is_not_unicode_survives_a_record(tmp_path):
    name = os.fsdecode(b"\xff[/b]")
    write_json(tmp_path / "r.json", {"name": name})
    assert read_json(tmp_path / "r.json") == {"name": name}


def test_a_missing_and_a_damaged_record_are_different_problems(tmp_path):
    with raises_problem("missing_file", str(tmp_path / "none.json")):
        read_json(tmp_path / "none.json")
    for text in ("{", "[1]", "[" * 100_000, f'{{"a": {"9" * 5000}}}'):
        (tmp_path / "bad.json").write_text(text)
        with raises_problem("damaged_file"):
            read_json(tmp_path / "bad.json")


def test_a_digest_distinguishes_type_shape_and_bits():
    zero = torch.zeros(2)
    found = {digest(part) for part in (zero, -zero, zero.double(), zero[None], torch.zeros(0), "a", ("a",), 0)}
    assert len(found) == 8 and digest(zero) == digest(zero.clone())


def test_a_fingerprint_covers_structure_parameters_and_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = model_fingerprint(model)
    model[1].running_mean += 1
    assert model_fingerprint(model) != before
