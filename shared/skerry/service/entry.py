"""What all command lines share: help, options, settings, the bus, errors and exit codes.

Importing this is cheap: a command line parses before it imports anything heavy. Help is plain text:
it is half as long as with boxes, and takes half the time without rich.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from skerry.errors import ConfigError, SkerryError, first_cause
from skerry.service import interrupts
from skerry.service.examples import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Coroutine, Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from typer.core import TyperCommand, TyperGroup

    from skerry.log.nats.bus import NatsBus
    from skerry.settings.local import NatsSettings, Settings

T = TypeVar("T")

Nats = Annotated[str | None, typer.Option(help="Use the broker at this address.", metavar="URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[str, typer.Option(envvar="SKERRY_RUN", help="Run id.", metavar="ID")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file.", metavar="FILE")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting.", metavar="A.B=C")
]

AllowCode = Annotated[
    list[str] | None,
    typer.Option("--allow-code", help="Let the run's config call this module.", metavar="MODULE"),
]
FromHf = Annotated[
    Path | None,
    typer.Option("--from-hf", help="Start from Hugging Face weights here.", metavar="FOLDER"),
]


def assignments(
    sets: Sequence[str] | None, allow_code: Sequence[str] | None, from_hf: Path | None
) -> list[str]:
    """Return the settings that options stand for, after those that were given as settings."""
    allowed = [f"allow_code={json.dumps(','.join(allow_code))}"] if allow_code else []
    folder = [] if from_hf is None else [f"model.path={json.dumps(str(from_hf.absolute()))}"]
    return [*(sets or []), *allowed, *folder]


def application(*, bare_shows_help: bool = False, completes: bool = False) -> typer.Typer:
    """Return a command line that has no commands yet; ``completes``: shells can complete it."""
    return typer.Typer(
        no_args_is_help=bare_shows_help,
        add_completion=completes,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


DEBUG = "SKERRY_DEBUG"


def collect_rarely() -> None:
    """Have Python look for cycles of dead objects less often than it does by default.

    A process that imports and traces JAX makes 200,000 objects that stay; to search them all again
    and again would take a tenth of its start.
    """
    gc.set_threshold(10_000, 50)


def answer(
    app: typer.Typer, name: str = "", also: Container[str] = (), *, computes: bool = False
) -> None:
    """Run this process's command line under the name ``skerry NAME``, as a person typed it.

    ``also`` are commands of the app that ``skerry`` itself has too: they go without NAME.
    ``computes``: threads may still be in XLA or numba at the end. Python's teardown would wait for
    them, or free what they use, which aborts the process; so it is left out.
    """
    interrupts.end_at_once()
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    name = "" if first in also else name
    command = cast("TyperCommand", typer.main.get_command(app))
    options = {option for parameter in command.params for option in parameter.opts}
    if first.endswith(".toml") and "--config" in options:
        print(f"error: {name} takes a file as an option: --config {first}.", file=sys.stderr)
        sys.exit(2)
    if computes:
        collect_rarely()
    try:
        with_examples(command, name)(prog_name=f"skerry {name}".strip())
    except SystemExit as end:
        code = 141 if _reader_is_gone(end) else end.code
        if not computes or isinstance(code, str):
            sys.exit(code)
        sys.stderr.flush()
        os._exit(code or 0)


def _reader_is_gone(error: BaseException) -> bool:
    """Return True where the reader of stdout has gone, as head does; no more is written then."""
    try:
        sys.stdout.flush()
        gone = isinstance(error.__context__, BrokenPipeError)  # typer and rich exit with 1
    except BrokenPipeError:
        gone = True
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def with_examples(command: TyperGroup | TyperCommand, path: str = "") -> TyperGroup | TyperCommand:
    """Return a command whose help, like that of all below it, ends with its example."""
    command.epilog = f"\b\nExample: {EXAMPLES[path]}" if path in EXAMPLES else None
    below: dict[str, TyperCommand] = getattr(command, "commands", {})
    for name, one in below.items():
        with_examples(one, f"{path} {name}".strip())
    return command


def settings_from(
    nats: str | None, config: Path | None, sets: Sequence[str] | None, *, service: str = ""
) -> Settings:
    """Load the settings of these options and the config file; begin the log of a ``service``."""
    from skerry.service.reporting import configure
    from skerry.settings import loading

    named = [f'nats.url="{nats}"'] if nats else []
    settings = loading.load(config, [*(sets or []), *named])
    if service:
        configure(settings.local.log_level, service=service)
    return settings


def bus_from(
    settings: NatsSettings,
    name: str,
    *,
    on_event: Callable[[str, Mapping[str, str]], None] | None = None,
) -> NatsBus:
    """Return a bus that is not connected yet; ``async with`` connects it.

    ``on_event`` is called with ``disconnected``, ``reconnected`` and ``error``. Raises ConfigError
    for a file with a password, a key or a certificate that cannot be used.
    """
    from skerry.log.nats.bus import NatsBus
    from skerry.log.nats.login import NatsOptions, login_of, tls_of
    from skerry.settings import loading

    password = loading.secret_in(settings.password_file, "nats.password_file")
    given = settings.model_dump(exclude={"url", "password_file"})
    if on_event is not None:
        given["on_event"] = on_event
    options = NatsOptions(**given, password=password)
    login_of(options)
    tls_of(options)
    return NatsBus(settings.url, name=name, options=options)


def explained(error: BaseException) -> BaseException:
    """Return an error that says what to do about one of JAX or of a path; any other as it is."""
    said = str(error)
    if isinstance(error, SkerryError):
        return error
    if isinstance(error, FileNotFoundError) and error.errno and error.filename is None:  # getcwd
        return ConfigError("The working folder is gone: change to a folder that is there.")
    if said == "Could not determine home directory.":
        msg = "A path begins with ~ and names no user of this machine: write the path in full."
        return ConfigError(msg)
    if "RESOURCE_EXHAUSTED" in said or isinstance(error, MemoryError):
        msg = (
            "Out of memory: lower data.batch, or keep it and set train.accumulate=2 or"
            ' train.remat="blocks"; `skerry plan` says what a model needs.'
        )
        return ConfigError(msg, path="data.batch")
    if "Unable to initialize backend" in said or "Unknown backend" in said:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        msg = (
            f"JAX cannot use JAX_PLATFORMS={wanted} here: `skerry doctor` says what is missing;"
            " without that variable JAX takes what there is."
        )
        return ConfigError(msg, path="JAX_PLATFORMS")
    return error


@contextmanager
def exit_on_error(*, logs: bool = False, cleans_up: bool = True) -> Generator[None]:
    """Print an error as one sentence on stderr and exit with its code; 1 for a defect.

    Unless the command ``cleans_up``, Ctrl-C ends it immediately, even while JAX is being imported.

    With ``--debug`` the error is raised, with its traceback; so is a defect if ``logs`` says that
    stderr is a service's log. Log lines of a command that configures no log go to stderr.
    """
    import structlog

    from skerry.status.format import printable

    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a terminal that is not UTF-8, a name that is not
    if cleans_up:
        interrupts.raise_again()
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        sys.exit(getattr(error, "exit_code", 130))
    except (Exception, BaseExceptionGroup) as error:
        cause = explained(first_cause(error))
        if isinstance(cause, BrokenPipeError):
            sys.exit(141)
        ours = isinstance(cause, SkerryError)
        if os.environ.get(DEBUG) or (logs and not ours):
            raise
        said = str(cause)
        if not ours:
            said = (
                f"{type(cause).__name__}: {said.partition(chr(10))[0]}. This is a defect, of Skerry"
                " or of code that it was given: add --debug to see where."
            )
        print(f"error: {printable(said)}", file=sys.stderr)
        sys.exit(cause.exit_code if isinstance(cause, SkerryError) else 1)


def run_service(
    main: Coroutine[object, object, T],
    around: AbstractContextManager[None] | None = None,
    alive: Path | None = None,
) -> T:
    """Run ``main`` to its end, within ``around``, under ``exit_on_error``; return what it returns.

    The file ``alive`` is touched as long as the event loop turns.
    """
    import asyncio

    from skerry.service.shell import touching

    with exit_on_error(logs=not sys.stderr.isatty()):
        try:
            with around or nullcontext():
                return asyncio.run(touching(alive, main))
        finally:
            main.close()  # if it never began
