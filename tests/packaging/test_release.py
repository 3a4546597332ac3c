"""``make release`` with a throw-away key: the same bytes twice, and a signature that counts."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import call

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen"),
    pytest.mark.skipif(not shutil.which("git"), reason="needs git"),
]
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@y.z")


def ok(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = call(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    ok("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, cwd=tmp_path)
    return path


@pytest.fixture
def clone(root: Path, tmp_path: Path, key: Path) -> Path:
    """This tree, released: a dated changelog, a golden run, and the key among the signers."""
    where = tmp_path / "clone"
    if call("git", "rev-parse", cwd=root).returncode:
        pytest.skip("not a git checkout")
    ok("git", "clone", "-q", "--depth", "1", root.as_uri(), where, cwd=tmp_path)
    log = where / "CHANGELOG.md"
    log.write_text(log.read_text().replace("(unreleased)", "(2026-12-24)", 1))
    (where / ".ci" / "signers").write_text(f"releaser {key.with_suffix('.pub').read_text()}")
    ok(*GIT, "commit", "-qam", "Release", cwd=where)
    return where


def release(clone: Path, uv: str, key: Path, out: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(uv).parent), os.environ["PATH"]])
    command = (sys.executable, clone / ".ci" / "release.py", key, "--out", out)
    return call(*command, cwd=clone, env={**os.environ, "PATH": path})


def test_a_release_is_the_same_twice_and_its_signature_tells_damage(
    clone: Path, uv: str, key: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        done = release(clone, uv, key, out)
        assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in first.iterdir() if path.name != ".gitignore")
    version = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["version"]
    archives = [f"skerry-{version}-py3-none-any.whl", f"skerry-{version}.tar.gz"]
    assert files == ["SHA256SUMS", "SHA256SUMS.sig", *archives]
    for name in ("SHA256SUMS", *archives):
        digests = {hashlib.sha256((out / name).read_bytes()).hexdigest() for out in (first, second)}
        assert len(digests) == 1, name
    ok("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=first)

    with zipfile.ZipFile(first / archives[0]) as wheel:
        metadata = wheel.read(f"skerry-{version}.dist-info/METADATA").decode()
    assert re.search(r"^Project-URL: ", metadata, re.MULTILINE)

    check = ("ssh-keygen", "-Y", "verify", "-f", clone / ".ci" / "signers", "-I", "releaser")
    check = (*check, "-n", "file", "-s", first / "SHA256SUMS.sig")
    sums = (first / "SHA256SUMS").read_text()
    for text, code in ((sums, 0), (sums.replace("a", "b", 1), 255)):
        done = subprocess.run(check, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_what_a_release_lacks_is_said_before_anything_is_built(
    clone: Path, uv: str, key: Path, tmp_path: Path
) -> None:
    log = clone / "CHANGELOG.md"
    log.write_text(re.sub(r" \(2026.*\)", " (unreleased)", log.read_text(), count=1))
    for path in (clone / "tests" / "golden" / "runs").iterdir():
        path.unlink()
    (clone / ".ci" / "signers").write_text("")
    done = release(clone, uv, key, tmp_path / "out")
    assert done.returncode == 1
    dated, golden, changed, signers = done.stderr.splitlines()
    assert "date it" in dated
    assert "has no run of" in golden
    assert "not committed" in changed
    assert "does not list" in signers
    assert not (tmp_path / "out").exists()
