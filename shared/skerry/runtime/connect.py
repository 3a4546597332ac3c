"""From settings to a bus: the one place that chooses the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.bus.base import Bus
    from skerry.settings import NatsSettings


def bus_from(
    settings: NatsSettings,
    name: str,
    *,
    needed_payload_bytes: int = 0,
    on_event: Callable[[str, Mapping[str, str]], None] | None = None,
) -> Bus:
    """Return a bus that is not connected yet; ``async with`` connects it.

    ``on_event`` hears of ``disconnected``, ``reconnected`` and ``error``.
    """
    from skerry.bus.nats_bus import NatsBus

    password = settings.password_file.read_text().strip() if settings.password_file else ""
    return NatsBus(
        settings.url,
        name=name,
        credentials=settings.credentials,
        user=settings.user,
        password=password,
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        publish_window=settings.publish_window,
        needed_payload_bytes=needed_payload_bytes,
        on_event=on_event,
    )
