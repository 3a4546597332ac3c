"""The store that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.protocol.subjects import checked_token
from skerry.store.base import StoreAccess
from skerry.store.opening import normal, open_store, real

if TYPE_CHECKING:
    from skerry.settings.models import StoreSettings
    from skerry.store.base import Store


def access_of(store: StoreSettings) -> StoreAccess:
    """Return how this machine reaches remote stores."""
    return StoreAccess(
        endpoint=store.endpoint,
        region=store.region,
        credentials=store.credentials,
        profile=store.profile,
        timeout_s=store.timeout_s,
    )


def root_of(store: StoreSettings) -> str:
    """Return the address that has a folder for every run."""
    return normal(store.url) if store.url else str(real(store.path))


def store_of(store: StoreSettings, run: str) -> Store:
    """Return the store of a run's checkpoints; ConfigError if its settings cannot be used."""
    return open_store(f"{root_of(store)}/{checked_token(run, 'run')}", access_of(store))
