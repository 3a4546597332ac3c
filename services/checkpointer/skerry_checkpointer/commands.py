"""What ``skerry checkpoints`` prints: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from skerry.errors import ConfigError, StoreError
from skerry.log.base import Bus
from skerry.settings.local import LocalSettings, StoreSettings
from skerry.settings.tree import split_assignment
from skerry.store.checkpoint import read_manifest, verify
from skerry.store.finding import all_summaries, locate, root_of
from skerry_checkpointer.restore import restore, span

NANOSECONDS = 1e9
LISTED = (
    *("index", "step", "tokens", "created_ns", "size_bytes", "versions"),
    *("ledger_sequence", "run_created_ns"),
)

WIDEST = 1000
"""Columns, more than any table has: a narrow terminal folds its lines, and no name is cut."""


def print_list(store: StoreSettings, run: str | None, *, as_json: bool) -> None:
    """Print the checkpoints in the store that the settings name."""
    root = root_of(store)
    found = all_summaries(root, run, store)
    if as_json:
        rows = [
            {"name": s.name, "path": s.path, "run": s.run, "error": s.error}
            | {key: getattr(s.checkpoint, key, None) for key in LISTED}
            for s in found
        ]
        print(json.dumps(rows))
        return
    if not found:
        print(f"No checkpoints below {root}.")
        return
    titles = ("run", "checkpoint", "written", "step", "tokens", "MB", "versions", "ledger")
    table = Table(*titles, box=None)
    for s in found:
        cells = ["unreadable"]
        if (held := s.checkpoint) is not None:
            written = datetime.fromtimestamp(held.created_ns / NANOSECONDS, UTC)
            size = f"{held.size_bytes / 1e6:.1f}"
            facts = (held.step, held.tokens, size, span(held.versions), held.ledger_sequence)
            cells = [f"{written:%Y-%m-%d %H:%M}", *map(str, facts)]
        table.add_row(*map(escape, (s.run, s.name, *cells)))
    Console(width=WIDEST).print(table)
    for sentence in filter(None, (s.error for s in found)):
        print(sentence)


def print_verified(path: str, store_settings: StoreSettings, *, as_json: bool) -> None:
    """Verify one checkpoint and print what it is; exit with 1 if it is damaged."""
    try:
        store, name = locate(path, store_settings)
        with _working(f"Verifying {store.where(name)}"):
            checkpoint = verify(store, name)
    except StoreError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "path": path, "error": str(error)}))
        sys.exit(error.exit_code)
    where = store.where(name)
    if as_json:
        keys = ("run", "step", "tokens", "ledger_sequence")
        facts = {key: getattr(checkpoint, key) for key in keys}
        print(json.dumps({"ok": True, "path": where, **facts}))
    else:
        what = f"run {checkpoint.run}, step {checkpoint.step}, {checkpoint.size_bytes} bytes"
        print(f"{where} is whole: {what}.")


async def print_restored(
    bus: Bus,
    path: str,
    run: str,
    extends: Sequence[str],
    access: StoreSettings,
    *,
    put_back: bool,
    exact: bool,
) -> None:
    """Write a checkpoint into the log as ``run``, or put back what the run lost, and print it."""
    if put_back and extends:
        msg = f"A run that is put back keeps its config: leave out --set {extends[0]}."
        raise ConfigError(msg, path=extends[0])
    store, name = locate(path, access)
    where, what = store.where(name), ""
    async with bus:
        with _working(f"Verifying {where} and writing it into the log"):
            how: dict[str, bool] = {"put_back": put_back, "exact": exact}
            changes = await restore(bus, where, run, sets=extends, access=access, **how)
    if put_back and changes:
        now = span([change.version for change in changes])
        before = span([change.saved for change in changes])
        what = f": {len(changes)} fragments written again, as version {now}, from version {before}"
    elif put_back:
        what = ": every fragment was as the checkpoint has it, and none was written"
    state = read_manifest(store, name).state
    pairs = [(s.commit.version, s.snapshot.commit.version) for s in state if s.snapshot]
    if changes and (behind := [pair for pair in pairs if pair[0] != pair[1]]):
        newest, snapshots = (span(versions) for versions in zip(*behind, strict=True))
        if exact:
            what += f", back at its snapshots of version {snapshots}"
        else:
            what += (
                f". What learners had at version {newest} goes on with the outer optimizer of"
                f" version {snapshots}; --exact goes back to that version"
            )
    print(f"Run {run} is restored from {where}{what}.")


def _working(what: str) -> Status:
    """Return a context that says on a terminal's stderr what is going on; nothing elsewhere."""
    return Console(stderr=True, quiet=not sys.stderr.isatty()).status(f"{escape(what)} …")


def split_sets(sets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the settings of the run, and those of the machine (``nats``, ``store``, …)."""
    machine = [s for s in sets if split_assignment(s)[0][0] in LocalSettings.model_fields]
    return [s for s in sets if s not in machine], machine
