"""Generate shared/skerry/protocol/v1 from the schema, or with --check fail on a difference.

protoc writes schema.bin, the schema that protobuf reads at import; dataclasses and enums
(messages.py) come from ``dataclasses_of.py``. The generated files are committed, so that installing
Skerry needs no compiler; CI runs this with ``--check``. It needs grpcio-tools of the dev group.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from dataclasses_of import module_of
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTO = Path(__file__).resolve().parent
OUT = PROTO.parent / "shared"
PACKAGE = Path("skerry", "protocol", "v1")
INIT = '"""Generated from proto/skerry/protocol/v1 by proto/generate.py: do not edit."""\n'


def compile_into(out: Path) -> None:
    """Write the generated package under ``out``."""
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    schema = out / "with_comments.bin"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"),
            *(f"--descriptor_set_out={schema}", "--include_source_info", *sources),
        ],
        check=True,
    )
    package = out / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(INIT)
    files = FileDescriptorSet.FromString(schema.read_bytes())
    (package / "messages.py").write_text(module_of(files))
    for file in files.file:
        file.ClearField("source_code_info")
    (package / "schema.bin").write_bytes(files.SerializeToString(deterministic=True))


def generated(root: Path) -> dict[str, bytes]:
    """Return name and bytes of every generated file that lies under ``root``."""
    folder = root / PACKAGE
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.*"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a diff")
    check = bool(parser.parse_args().check)
    with tempfile.TemporaryDirectory() as scratch:
        compile_into(Path(scratch))
        want, have = generated(Path(scratch)), generated(OUT)
    stale = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    if check:
        for name in stale:
            print(f"{OUT / PACKAGE / name} is not what proto/ says: run python proto/generate.py")
        return 1 if stale else 0
    (OUT / PACKAGE).mkdir(parents=True, exist_ok=True)
    for name in stale:
        target = OUT / PACKAGE / name
        if name in want:
            target.write_bytes(want[name])
        else:
            target.unlink()
        print(f"wrote {target}" if name in want else f"removed {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
