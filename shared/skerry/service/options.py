"""What all command lines share: the look of ``--help``, and the options of the services.

Help is plain text: it is half as long as with boxes, and takes half the time without rich.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from skerry.settings.models import Settings

Nats = Annotated[str | None, typer.Option(help="Broker address.", metavar="URL")]
Run = Annotated[str, typer.Option(envvar="SKERRY_RUN", help="Run id.", metavar="ID")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file.", metavar="FILE")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting.", metavar="A.B=C")
]


def application(*, bare_shows_help: bool = False) -> typer.Typer:
    """Return a command line that has no commands yet."""
    return typer.Typer(
        no_args_is_help=bare_shows_help,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def settings_from(
    nats: str | None, config: Path | None, sets: Sequence[str] | None, *, service: str = ""
) -> Settings:
    """Load what these options and the config file say; a ``service`` also begins its log."""
    from skerry.service.logs import configure
    from skerry.settings import loading

    named = [f'nats.url="{nats}"'] if nats else []
    settings = loading.load(config, [*(sets or []), *named])
    if service:
        configure(settings.local.log_level, service=service)
    return settings


def answer(app: typer.Typer, name: str, also: Container[str] = ()) -> None:
    """Answer this process's command line under the name ``skerry NAME``, which a person typed.

    ``also`` are commands of the app that ``skerry`` itself has too: they go without NAME.
    """
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    app(prog_name="skerry" if first in also else f"skerry {name}")
