"""A whole small run as a release writes it, log and checkpoint, in one compressed file.

``python tests/golden/run.py --yes`` writes ``runs/<version>.tar.xz`` when a release is made. Files
of releases before stay: ``tests/integration/test_golden_run.py`` goes on with each.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from skerry.log import ledger
from skerry.log.base import Record, Retention, Storage, StreamSpec
from skerry.log.memory import MemoryBroker
from skerry.log.memory_stream import MemoryStream
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from tests.support.audited import create, train

RUN = "golden"
RUNS = Path(__file__).parent / "runs"
LOG = "log.json"
VERSIONS = 20
"""More than ``sync.snapshot_every``: keyframes, deltas and snapshots of several versions."""


def dump(broker: MemoryBroker) -> bytes:
    """Return all streams of a log as JSON."""
    streams = [
        {
            "spec": dataclasses.asdict(stream.spec),
            "last": stream.last_seq,
            "records": [
                {**dataclasses.asdict(r), "payload": base64.b64encode(r.payload).decode()}
                for r in stream.records.values()
            ],
        }
        for stream in broker.streams.values()
        if stream.spec.storage is Storage.FILE
    ]
    return json.dumps(streams, default=dict).encode()


def restored(text: bytes) -> MemoryBroker:
    """Return a broker with the streams of ``dump``, at the time of its newest record."""
    streams: list[dict[str, Any]] = json.loads(text)
    newest = max(r["time_ns"] for stream in streams for r in stream["records"])
    broker = MemoryBroker(clock_ns=lambda: newest)
    for held in streams:
        spec = dict(held["spec"], subjects=tuple(held["spec"]["subjects"]))
        spec |= {"retention": Retention(spec["retention"]), "storage": Storage(spec["storage"])}
        stream = MemoryStream(StreamSpec(**spec))
        for record in held["records"]:
            stream.store(Record(**record | {"payload": base64.b64decode(record["payload"])}))
        stream.last_seq = held["last"]
        broker.streams[spec["name"]] = stream
    return broker


async def made(folder: Path) -> bytes:
    """Train the run, write its checkpoint into a folder and return its log."""
    bus = MemoryBroker().connect()
    await create(bus, RUN)
    await train(bus, RUN, VERSIONS, syncers=2)
    record = await ledger.read_run(bus, RUN)
    assert await Checkpointer.of(bus, record, LocalStore(folder)).save() is not None
    return dump(bus.broker)


def main() -> int:
    if sys.argv[1:] != ["--yes"]:
        print(__doc__)
        return 2
    path = RUNS / f"{version('skerry')}.tar.xz"
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, tarfile.open(path, "w:xz") as archive:
        text = asyncio.run(made(Path(place)))
        entry = tarfile.TarInfo(LOG)
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
        archive.add(place, "checkpoints")
    print(f"wrote {path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
