"""How to install what is missing beside this Skerry, however it was installed itself."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from urllib.parse import unquote, urlsplit

from skerry.errors import ConfigError


def command(*packages: str, extra: str = "") -> str:
    """Return what a person types to get packages, or an extra of Skerry, into this Python.

    An extra comes from where this Skerry came: a checkout, a wheel's file, or an index.
    """
    quoted = shlex.join([*packages, *(_requirement(extra) if extra else ())])
    if importlib.util.find_spec("pip"):
        return f"{sys.executable} -m pip install {quoted}"
    if shutil.which("uv"):
        return f"uv pip install --python {sys.executable} {quoted}"
    return f"python3 -m pip --python {sys.executable} install {quoted}"


def missing(setting: str, package: str, extra: str) -> ConfigError:
    """Return the error for a setting that needs a package of an extra that is not installed."""
    msg = (
        f"{setting} needs {package}, which is not installed: run `{command(extra=extra)}`, or leave"
        f" {setting} out."
    )
    return ConfigError(msg, path=setting)


def version_of(package: str) -> str:
    """Return the installed version of a package, empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _requirement(extra: str) -> tuple[str, ...]:
    named = f"skerry[{extra}]"
    try:
        found = distribution("skerry")
    except PackageNotFoundError:
        return (named,)
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if not url:
        return (f"{named}=={found.version}",)
    if origin.get("dir_info", {}).get("editable"):
        return "-e", f"{unquote(urlsplit(url).path)}[{extra}]"
    return (f"{named} @ {url}",)
