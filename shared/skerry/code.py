"""Functions that settings name as ``module:function``, from modules that this machine allows.

A run record, a checkpoint or a remote config may name any function of any module. It is called only
if this machine's owner allowed its module: with the setting ``allow_code``, or by naming the
function in this process's own settings. Only optax's optimizers are always allowed: our own
modules also hold functions that write files. The function must also be *defined* in an allowed
module, so that ``mine:Popen`` is refused although ``mine`` imports it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, cast

from skerry.errors import ConfigError

OPTAX = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars"
    " lbfgs lion nadam nadamw noisy_sgd novograd optimistic_adam optimistic_gradient_descent"
    " polyak_sgd radam rmsprop rprop sgd sign_sgd signum sm3 yogi"
)
"""The optimizers that optax documents."""
DOCUMENTED = frozenset(f"optax:{name}" for name in OPTAX.split())

_allowed: set[str] = set()


class CodeRefused(ConfigError):
    """Settings from elsewhere name code that this machine does not allow; ``module`` is where."""

    def __init__(self, message: str, *, path: str, module: str) -> None:
        super().__init__(message, path=path)
        self.module = module


def allow(modules: Iterable[str]) -> None:
    """Allow modules, and what is below them, in this process."""
    _allowed.update(modules)


def allowed() -> tuple[str, ...]:
    """Return the modules that this machine's owner has allowed in this process."""
    return tuple(sorted(_allowed))


def module_of(reference: str) -> str:
    """Return the module of ``module:function``; empty for text of another form."""
    module, colon, function = reference.partition(":")
    return module if colon and function else ""


def refuse(reference: str, setting: str) -> None:
    """Raise CodeRefused if a setting names a function of a module that is not allowed."""
    module = module_of(reference)
    if module and reference not in DOCUMENTED and not _is_allowed(module):
        raise _refused(reference, setting, module)


def load(reference: str, setting: str) -> Callable[..., Any]:
    """Import and return the function that a setting names.

    Raises CodeRefused before anything is imported, the import's own errors, and TypeError for what
    is no function.
    """
    refuse(reference, setting)
    module, _, function = reference.partition(":")
    found: object = getattr(import_module(module), function)
    if not callable(found):
        msg = f"{function} is no function, but {type(found).__name__}"
        raise TypeError(msg)
    inner: object = cast("partial[object]", found).func if isinstance(found, partial) else found
    home = str(getattr(inner, "__module__", None) or type(inner).__module__)
    if reference not in DOCUMENTED and not _is_allowed(home):
        raise _refused(reference, setting, home)
    return cast("Callable[..., Any]", found)


def build(
    reference: str,
    setting: str,
    options: Mapping[str, object],
    failure: type[ConfigError] = ConfigError,
    offered: Mapping[str, object] | None = None,
) -> Any:
    """Return what the function that a setting names returns for these options.

    ``offered`` are further options; the function gets those that its parameters name.

    Raises CodeRefused, and ``failure`` for whatever the import or the call raises.
    """
    try:
        function = load(reference, setting)
        named = _parameters(function)
        more = {name: value for name, value in (offered or {}).items() if name in named}
        return function(**{**more, **options})
    except CodeRefused:
        raise
    except Exception as error:
        takes = f" that takes {', '.join(options)} as keyword arguments" if options else ""
        msg = (
            f"{setting} {reference!r} failed: {error}. It must name an importable module:function"
            f"{takes}."
        )
        raise failure(msg, path=setting) from error


def failure(error: Exception, returns: str) -> str:
    """Say what went wrong in somebody's function, in which line of it, and what it must return."""
    frames = traceback.extract_tb(error.__traceback__)
    others = "site-packages", __file__.rpartition("/")[0]
    own = [frame for frame in frames if not any(place in frame.filename for place in others)]
    what = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    place = f"; {own[-1].filename.rpartition('/')[2]}, line {own[-1].lineno}" if own else ""
    return f"({what}{place}): it must return {returns}."


def _parameters(function: Callable[..., Any]) -> Container[str]:
    """Return the names of a function's parameters; none where it does not say."""
    try:
        return signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _is_allowed(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _allowed)


def _refused(reference: str, setting: str, module: str) -> CodeRefused:
    msg = (
        f"{setting} is {reference!r}, and this machine does not allow code from {module!r}: if you "
        f"trust it, add --set allow_code={module}, or set SKERRY_ALLOW_CODE={module}."
    )
    return CodeRefused(msg, path=setting, module=module)
