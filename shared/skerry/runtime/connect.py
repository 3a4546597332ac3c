"""From settings to a bus: the one place that chooses the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.bus.base import Bus
    from skerry.settings import NatsSettings


def bus_from(settings: NatsSettings, name: str, *, needed_payload_bytes: int = 0) -> Bus:
    """Return a bus that is not connected yet; ``async with`` connects it."""
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
    )
