"""Local files on file systems that cannot do all: the file is there, and what was left out is said once."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir import checkpoint


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch, caplog):
    monkeypatch.setattr(storage, "_said", set())
    caplog.set_level(logging.INFO, logger="flowgrpo_ray")


def fails(monkeypatch, name: str, number: int, only=lambda *args: True) -> None:
    """`os.<name>` fails with an error number, for the arguments that `only` picks."""
    original = getattr(os, name)

    def failing(*args):
        if only(*args):
            raise OSError(number, os.strerror(number))
        return original(*args)

    monkeypatch.setattr(os, name, failing)


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def is_file(descriptor: int) -> bool:
    return not is_folder(descriptor)


CANNOT = {
    "a share that syncs no folders": ("fsync", errno.EINVAL, is_folder, "sync a folder"),
    "a folder that cannot be opened": (
        "open", errno.EACCES, lambda path, *_: os.path.isdir(path), "sync a folder"),
    "a file system without sync": ("fsync", errno.ENOSYS, is_file, "sync a file"),
    "a store without permissions": (
        "chmod", errno.EPERM, lambda *_: True, "give a file the permissions of others"),
    "a store without renaming": ("replace", errno.EPERM, lambda *_: True, "move a file into its place"),
    "a store that renames over nothing": (
        "replace", errno.EEXIST, lambda _, path: path.exists(), "move a file into its place"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_a_file_system_cannot_do_is_said_once(case, tmp_path, monkeypatch, caplog):
    name, number, only, said = CANNOT[case]
    fails(monkeypatch, name, number, only)
    uri = str(tmp_path / "run")
    for step in (1, 2):
        entries = checkpoint.write_files(checkpoint.step_dir(uri, step), {"a": b"1" * step, "b/c": b"2"})
        checkpoint.commit(checkpoint.step_dir(uri, step), entries, {}, run_id="r", step=step, result_hash="h")
    again = storage.write_bytes(str(tmp_path / "run/file"), b"first")
    storage.write_bytes(again, b"second")
    assert storage.read_bytes(again) == b"second"
    assert checkpoint.latest(uri).step == 2
    monkeypatch.undo()
    assert not [path for path in Path(uri).rglob(".*")], "no temporary file is left"
    (message,) = caplog.messages
    assert f"cannot {said}" in message and os.strerror(number) in message


@pytest.mark.parametrize(("name", "number"), [
    ("fsync", errno.EIO), ("fsync", errno.ENOSPC), ("replace", errno.ENOSPC), ("fsync", errno.EDQUOT)])
def test_lost_data_are_an_error(name, number, tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    storage.write_bytes(str(file), b"before")
    fails(monkeypatch, name, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        storage.write_bytes(str(file), b"after")
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]
    assert not caplog.messages


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        storage.write_bytes(str(tmp_path / "file"), b"")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_has_the_permissions_of_others(tmp_path):
    file = tmp_path / "file"
    storage.write_bytes(str(file), b"")
    assert file.stat().st_mode & 0o777 == 0o666 & ~storage._umask()
