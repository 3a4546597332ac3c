"""Connecting to a bucket: address, credentials, and the sentences for what S3 refuses.

Credentials come from ``store.credentials`` (a file in AWS's own format), or from where every cloud
tool looks: the environment, ``~/.aws/credentials``, and what the cloud gives a machine, a container
or a pod. They are never part of an address, of a config file or of a log line.
"""

# pyright: basic
# obstore's listings are typed in parts.

from __future__ import annotations

import configparser
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore import store as stores
from obstore.exceptions import BaseError

from skerry.errors import ConfigError, StoreError
from skerry.store.base import NAME

if TYPE_CHECKING:
    from collections.abc import Generator

    from obstore import ObjectMeta

    from skerry.settings.models import StoreSettings

SCHEME = "s3"
RETRIES = 5
CREDENTIALS = Path("~/.aws/credentials")
KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

FORBIDDEN = ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "403 Forbidden")
UNREACHABLE = ("error sending request", "timed out", "dns error", "Connection refused")
NO_CREDENTIALS = ("169.254.169.254", "Missing SecretAccessKey")


def connect(url: str, access: StoreSettings) -> stores.S3Store:
    """Return a client of the folder that ``s3://bucket/prefix`` names; nothing is sent yet.

    Raises ConfigError for an address or credentials that cannot be used.
    """
    bucket, prefix = split(url)
    given = {"endpoint": access.endpoint, "region": access.region}
    config = {key: value for key, value in given.items() if value} | _keys(access)
    timeout = timedelta(seconds=access.timeout_s)
    make = partial(stores.S3Store, bucket, prefix=prefix or None, config=config)  # type: ignore[arg-type]
    try:
        endpoint = str(make().config.get("endpoint", ""))  # perhaps from the environment
        return make(
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": timeout},
            retry_config={"max_retries": RETRIES, "retry_timeout": timeout},
        )
    except BaseError as error:
        msg = f"The S3 settings for {url} cannot be used: {_first_line(error)}"
        raise ConfigError(msg, path="store.url") from error


def split(url: str) -> tuple[str, str]:
    """Return bucket and prefix of an ``s3://`` address; ConfigError if it is none."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME or not parts.netloc or "@" in parts.netloc:
        msg = f"{url.rpartition('@')[2]!r} is no address of a bucket: write s3://bucket/prefix."
        raise ConfigError(msg, path="store.url")
    return parts.netloc, parts.path.strip("/")


def listed(client: stores.S3Store, folder: str | None = None) -> list[ObjectMeta]:
    """Return all objects in a folder and below it."""
    return [meta for batch in obstore.list(client, prefix=folder) for meta in batch]


def folders(client: stores.S3Store) -> list[str]:
    """Return the names of the folders right below."""
    found = obstore.list_with_delimiter(client, "")["common_prefixes"]
    names = [prefix.rstrip("/").rpartition("/")[2] for prefix in found]
    return sorted(name for name in names if NAME.fullmatch(name))


def _keys(access: StoreSettings) -> dict[str, str]:
    """Return keys from a credentials file, or nothing where the environment has to have them."""
    if access.credentials is not None:
        found = _profile(access.credentials.expanduser(), access.profile)
        if found is None:
            msg = (
                f"store.credentials is {access.credentials}, which holds no keys under "
                f"[{access.profile}]: write aws_access_key_id and aws_secret_access_key there."
            )
            raise ConfigError(msg, path="store.credentials")
        return found
    try:
        has_keys = "access_key_id" in stores.S3Store("any").config
    except BaseError:  # half of a pair of keys: the client itself will say so
        has_keys = True
    return {} if has_keys else _profile(CREDENTIALS.expanduser(), access.profile) or {}


def _profile(path: Path, profile: str) -> dict[str, str] | None:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return None
    if not parser.has_section(profile):
        return None
    found = {key: parser[profile][key] for key in KEYS if key in parser[profile]}
    return found if set(KEYS[:2]) <= found.keys() else None


@contextmanager
def refusals(where: str) -> Generator[None]:
    """Turn what S3 refuses into one sentence with the fix."""
    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError, TimeoutError) as error:
        raise refused(where, error) from error


def refused(where: str, error: Exception) -> StoreError:
    """Say what S3 refused at ``where`` and what helps."""
    text = str(error)
    if "NoSuchBucket" in text:
        bucket, _ = split(where)
        return StoreError(f"There is no bucket {bucket!r}: create it or change store.url.")
    if any(mark in text for mark in NO_CREDENTIALS):
        return StoreError(
            f"There are no credentials for {where}: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or store.credentials."
        )
    if any(mark in text for mark in FORBIDDEN) or "Unauthenticated" in type(error).__name__:
        return StoreError(
            f"S3 allows these credentials too little at {where}: they must read, write, list and "
            "delete there; check the keys and the bucket's policy."
        )
    if any(mark in text for mark in UNREACHABLE) or isinstance(error, TimeoutError):
        return StoreError(
            f"S3 does not answer for {where}: check store.endpoint, store.region and the network."
        )
    if isinstance(error, FileNotFoundError):
        return StoreError(f"There is no {where}: check the address.")
    return StoreError(f"S3 refused {where}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
