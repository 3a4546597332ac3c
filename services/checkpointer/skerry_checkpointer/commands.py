"""What ``skerry checkpoints`` prints: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from skerry.errors import ConfigError, StoreError
from skerry.store.checkpoint import read_manifest, verify
from skerry.store.listing import all_summaries, locate
from skerry.store.opening import root_of
from skerry_checkpointer.compare import span
from skerry_checkpointer.put_back import put_back
from skerry_checkpointer.restore import restore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from skerry.log.base import Bus
    from skerry.settings.models import StoreSettings
    from skerry.store.listing import Summary
    from skerry_checkpointer.put_back import PutBack

NANOSECONDS = 1e9


def print_list(store: StoreSettings, run: str | None, *, as_json: bool) -> None:
    """Print the checkpoints in the store that the settings name."""
    root = root_of(store)
    found = all_summaries(root, run, store)
    if as_json:
        print(json.dumps([asdict(summary) for summary in found]))
    elif not found:
        print(f"No checkpoints below {root}.")
    else:
        titles = ("run", "checkpoint", "written", "step", "tokens", "MB", "versions", "ledger")
        table = Table(*titles, box=None)
        for summary in found:
            table.add_row(*map(escape, _cells(summary)))
        Console().print(table)


def _cells(summary: Summary) -> tuple[str, ...]:
    if summary.error:
        return (summary.run, summary.name, "unreadable", "", "", "", summary.error, "")
    return (
        summary.run,
        summary.name,
        f"{datetime.fromtimestamp(summary.created_ns / NANOSECONDS, UTC):%Y-%m-%d %H:%M:%S}",
        str(summary.step),
        str(summary.tokens),
        f"{summary.size_bytes / 1e6:.1f}",
        span(summary.versions),
        str(summary.ledger_sequence or "?"),
    )


def print_verified(path: str, store_settings: StoreSettings, *, as_json: bool) -> None:
    """Verify one checkpoint and print what it is; exit with 1 if it is damaged."""
    try:
        store, name = locate(path, store_settings)
        total = read_manifest(store, name).size_bytes
        with _progress("verifying", total) as on_bytes:
            checkpoint = verify(store, name, on_bytes=on_bytes)
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
        print(f"{where} is whole: run {checkpoint.run}, step {checkpoint.step}, {total} bytes.")


async def print_restored(
    bus: Bus,
    path: str,
    run: str,
    extends: Sequence[str],
    store_settings: StoreSettings,
    *,
    replace: bool = False,
) -> None:
    """Write a checkpoint into the log as ``run``, or put back what the run lost, and print it."""
    if replace and extends:
        msg = f"A run that is put back keeps its config: leave out --set {extends[0]}."
        raise ConfigError(msg, path=extends[0])
    access = store_settings
    store, name = locate(path, access)
    where, what = store.where(name), ""
    async with bus:
        with _progress("verifying", read_manifest(store, name).size_bytes) as on_bytes:
            if replace:
                changes = await put_back(bus, where, run, access=access, on_bytes=on_bytes)
                what = f": {_in_words(changes)}"
            else:
                await restore(bus, where, run, sets=extends, access=access, on_bytes=on_bytes)
    print(f"Run {run} is restored from {where}{what}.")


def _in_words(changes: Sequence[PutBack]) -> str:
    if not changes:
        return "every fragment is as the checkpoint has it"
    now = span([change.version for change in changes])
    before = span([change.saved for change in changes])
    return f"{len(changes)} fragments written again, as version {now}, from version {before}"


def split_sets(sets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the settings of the run, and those of the machine (``nats``, ``store``, …)."""
    from skerry.settings.models import LocalSettings
    from skerry.settings.tree import split_assignment

    machine = [s for s in sets if split_assignment(s)[0][0] in LocalSettings.model_fields]
    return [s for s in sets if s not in machine], machine


@contextmanager
def _progress(what: str, total: int) -> Generator[Callable[[int], None]]:
    """Show a bar of bytes on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.update(task, advance=count)
