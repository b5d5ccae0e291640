"""Versions and commit of the code."""

import subprocess

from flowgrpo_ray import provenance


def git(folder, *args):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_tracked_package_and_whether_it_was_changed(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert provenance.commit(package) is None, "no repository"
    git(tmp_path, "init", "-q")
    assert provenance.commit(package) is None, "installed inside somebody else's repository"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("not of the code")
    assert provenance.commit(package) == {"id": head, "dirty": False}
    (package / "__init__.py").write_text("1")
    assert provenance.commit(package) == {"id": head, "dirty": True}


def test_a_start_is_stamped_with_versions():
    stamp = provenance.stamp(7)
    assert stamp["step"] == 7 and stamp["versions"]["torch"] and stamp["versions"]["flowgrpo-ray"]
