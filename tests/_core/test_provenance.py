"""Provenance: the commit in records."""

import subprocess

from advnorm._core import provenance


def test_the_commit_is_that_of_the_package_with_a_plus_where_its_files_differ(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "advnorm" / "_core" / "provenance.py"))
    monkeypatch.setenv("ADVNORM_COMMIT", "of a container")
    (tmp_path / "advnorm" / "_core").mkdir(parents=True)
    first = tmp_path / "advnorm" / "__init__.py"
    first.touch()
    git("init", "-q")
    found = provenance._commit.__wrapped__
    assert found() == "of a container"  # a repository around it that is not its own
    git("add", ".")
    git("commit", "-q", "-m", "x")
    (tmp_path / "advnorm" / "new.txt").touch()
    assert found() == git("rev-parse", "HEAD")
    first.write_text("changed")
    assert found() == git("rev-parse", "HEAD") + "+"
