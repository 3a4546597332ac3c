"""Build a release: wheel, source archive, checksums and the releaser's signature of them.

    python .ci/release.py KEY [--out dist]       make release KEY=~/.ssh/id_ed25519

Both archives have the commit's date and the build backend that pyproject.toml pins, so that a
second build of the commit gives the same bytes. The signature is ssh-keygen's (``-Y sign``,
namespace ``file``); the key's public part must stand in ``.ci/signers``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"


def output(*command: str | Path, **options: str) -> str:
    """Return what a command prints; SystemExit with what it says when it fails."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def complaints(version: str, signers: Path, key: Path) -> list[str]:
    """Return what is missing for a release, each a sentence with its fix."""
    found: list[str] = []
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or not re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", newest[1]):
        found.append(f"CHANGELOG.md does not begin with '## {version} (YYYY-MM-DD)': date it.")
    if not (ROOT / "tests" / "golden" / "runs" / f"{version}.tar.xz").is_file():
        found.append(
            f"tests/golden/runs has no run of {version}: `python tests/golden/run.py --yes`."
        )
    if output("git", "status", "--porcelain"):
        found.append("The folder has changes that are not committed: commit or stash them.")
    public = key.with_name(f"{key.name}.pub")
    if not public.is_file():
        found.append(f"{public} is not there: name the private key that lies beside it.")
    elif " ".join(public.read_text().split()[:2]) not in signers.read_text():
        found.append(f"{signers} does not list {public}: add the line 'NAME KEYTYPE KEY'.")
    return found


def build(out: Path) -> list[Path]:
    """Build the source archive, and the wheel from it; return both."""
    date = output("git", "log", "-1", "--format=%ct")
    places = os.pathsep.join([str(ROOT / ".tools" / "bin"), os.environ.get("PATH", "")])
    uv = shutil.which("uv", path=places) or sys.exit("There is no uv: run `make setup` first.")
    output(uv, "build", "--quiet", "--out-dir", out, ROOT, SOURCE_DATE_EPOCH=date)
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def main() -> None:
    """Check, build, sum up and sign."""
    parser = argparse.ArgumentParser(description="Build and sign a release.")
    parser.add_argument("key", type=Path, help="private key of ssh-keygen that signs")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty folder")
    parser.add_argument("--signers", type=Path, default=ROOT / ".ci" / "signers")
    given = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    missing = complaints(version, given.signers, given.key.expanduser())
    if given.out.is_dir() and any(given.out.iterdir()):
        missing.append(f"{given.out} is not empty: remove what is in it.")
    if missing:
        sys.exit("\n".join(missing))
    files = build(given.out.absolute())
    sums = given.out / SUMS
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    sums.write_text("".join(lines))
    output("ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", given.key, sums.absolute())
    print(f"{sums.read_text()}Signed: {sums}.sig")


if __name__ == "__main__":
    main()
