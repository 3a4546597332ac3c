"""The store that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.protocol.subjects import checked_token
from skerry.store.opening import S3Access, normal, open_store, real

if TYPE_CHECKING:
    from skerry.settings.models import StoreSettings
    from skerry.store.base import Store


def access_of(store: StoreSettings) -> S3Access:
    """Return how buckets are reached from this machine."""
    return S3Access(
        endpoint=store.endpoint,
        region=store.region,
        credentials=store.credentials,
        profile=store.profile,
        timeout_s=store.timeout_s,
    )


def root_of(store: StoreSettings) -> str:
    """Return the address below which every run has its folder."""
    return normal(store.url) if store.url else str(real(store.path))


def store_of(store: StoreSettings, run: str) -> Store:
    """Return where a run's checkpoints lie; ConfigError if that cannot be used."""
    return open_store(f"{root_of(store)}/{checked_token(run, 'run')}", access_of(store))
