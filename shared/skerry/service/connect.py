"""From settings to a bus: the one place that chooses the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from skerry.log.base import Bus
    from skerry.settings.models import NatsSettings


def bus_from(
    settings: NatsSettings,
    name: str,
    *,
    needed_payload_bytes: int = 0,
    on_event: Callable[[str, Mapping[str, str]], None] | None = None,
) -> Bus:
    """Return a bus that is not connected yet; ``async with`` connects it.

    ``on_event`` is called with ``disconnected``, ``reconnected`` and ``error``. Raises ConfigError
    for a password or credentials file that cannot be used.
    """
    from skerry.log.nats.bus import NatsBus
    from skerry.log.nats.connection import NatsOptions

    password = _secret(settings.password_file, "nats.password_file")
    _secret(settings.credentials, "nats.credentials")
    options = NatsOptions(
        credentials=settings.credentials,
        user=settings.user,
        password=password,
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        publish_window=settings.publish_window,
        needed_payload_bytes=needed_payload_bytes,
        on_event=on_event,
    )
    return NatsBus(settings.url, name=name, options=options)


def _secret(path: Path | None, setting: str) -> str:
    """Return what a secret's file holds; empty where there is none."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        msg = f"{setting} is {path}, which cannot be read ({why}): name a file that you may read."
        raise ConfigError(msg, path=setting) from error
