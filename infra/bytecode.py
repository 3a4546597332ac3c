"""Compile what a service imports, late imports too: half of its environment is never imported.

Run by the environment's Python. A copy of an image's files may round their times, from which Python
would take bytecode to be old: this bytecode is taken as it is.
"""

import ast
import contextlib
import importlib
import py_compile
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
OWN = sorted(SITE.glob("skerry*/**/*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the names that a module may import, wherever in it that is."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (module, *(f"{module}.{alias.name}" for alias in aliases))
            case _:
                pass


for own in OWN:
    for name in imports(own):
        with contextlib.suppress(ImportError):  # no module, or one of a service that is not here
            importlib.import_module(name)
held = {Path(getattr(module, "__file__", None) or "") for module in sys.modules.values()}
for file in {*OWN, *held}:
    if file.suffix == ".py" and file.is_relative_to(SITE):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(file), invalidation_mode=mode, doraise=True)
