"""A learner or a syncer that writes down its steps and what the log has acknowledged to it.

``noted_service.py learner|syncer OUT STEP_S ARGUMENTS`` is the real program with these arguments.
Each step takes ``STEP_S`` longer, so that several learners leave room on few cores. A line of OUT
is a note as JSON: what, when (seconds since the epoch), and more of an acknowledgement.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from skerry.log.base import Receipt
from skerry.log.nats.bus import NatsBus
from skerry.protocol.subjects import stream_of

KEPT = "LEDGER", "CONTRIB"
"""Streams that keep every message: whatever they acknowledged can be asked for."""

Noting = Callable[..., None]


def noting_to(path: str) -> Noting:
    """Return what adds a note to a file, which keeps it if this process is killed."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(what: str, *more: object) -> None:
        os.write(out, json.dumps([what, time.time(), *more]).encode() + b"\n")

    return note


def digest_of(payload: bytes) -> str:
    return blake2b(payload, digest_size=16).hexdigest()


def note_acknowledgements(note: Noting) -> None:
    publish = NatsBus.publish

    async def noted(self: NatsBus, subject: str, payload: bytes, **more: Any) -> Receipt:
        receipt = await publish(self, subject, payload, **more)
        stream = stream_of(subject)
        if any(kind in stream for kind in KEPT):
            note("ack", stream, receipt.sequence, digest_of(payload))
        return receipt

    NatsBus.publish = noted  # type: ignore[method-assign] # what it measures


def note_training(note: Noting, step_s: float) -> None:
    """Note each step, and each contribution once the log has all of it."""
    from skerry.client.meter import Meter
    from skerry.client.sending import ContributionSender
    from skerry_learner.trainer.trainer import Trainer

    stepped, send, step = Meter.stepped, ContributionSender._encode_and_send, Trainer.step

    def longer_step(self: Trainer, *given: Any) -> Any:
        time.sleep(step_s)
        return step(self, *given)

    def noted_step(self: Meter, whole_s: float) -> None:
        note("step")
        stepped(self, whole_s)

    async def noted_send(self: ContributionSender, outgoing: Any) -> None:
        await send(self, outgoing)
        note("contribution")

    Trainer.step = longer_step  # type: ignore[method-assign] # else they compete for cores
    Meter.stepped = noted_step  # type: ignore[method-assign] # what it measures
    ContributionSender._encode_and_send = noted_send  # type: ignore[method-assign] # the same


def main() -> None:
    kind, out, step_s, *arguments = sys.argv[1:]
    note = noting_to(out)
    note_acknowledgements(note)
    if kind == "learner":
        note_training(note, float(step_s))
    sys.argv[1:] = arguments
    importlib.import_module(f"skerry_{kind}.__main__").main()


if __name__ == "__main__":
    main()
