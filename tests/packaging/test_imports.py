"""Every module imports, light services stay light, and packages hide nothing behind __init__."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.support.processes import call

PACKAGES = {
    "skerry": "shared/skerry",
    "skerry_learner": "services/learner/skerry_learner",
    "skerry_syncer": "services/syncer/skerry_syncer",
    "skerry_checkpointer": "services/checkpointer/skerry_checkpointer",
    "skerry_evaluator": "services/evaluator/skerry_evaluator",
    "skerry_health_monitor": "services/health_monitor/skerry_health_monitor",
    "skerry_tools": "shared/skerry_tools",
}
HEAVY = "jax jaxlib numba optax"

# Run in a fresh interpreter: argv is the packages, then the modules that are not installed there.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys

packages, absent = (given.split() for given in sys.argv[1:])

for name in absent:
    sys.modules[name] = None  # importing it fails, find_spec says None
torch = importlib.util.find_spec("torch") and importlib.util.find_spec("lightning")
for package in packages:
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, package + "."):
        if torch or "torch_" not in module.name and not module.name.endswith("_torch"):
            importlib.import_module(module.name)
"""


def import_all(packages: str, absent: str = "") -> None:
    done = call(sys.executable, "-W", "ignore", "-c", IMPORT_ALL, packages, absent)
    assert done.returncode == 0, done.stderr


@pytest.mark.drill
def test_every_module_imports() -> None:
    import_all("skerry skerry_learner skerry_syncer")


def test_every_module_of_a_light_service_imports_where_jax_and_numba_are_missing() -> None:
    import_all("skerry_checkpointer skerry_health_monitor", HEAVY)


def test_the_client_library_needs_no_jax_but_where_it_is_named_after_it(root: Path) -> None:
    there = [path.stem for path in (root / "shared/skerry/client").glob("*.py")]
    modules = [
        f"skerry.client.{name}" for name in there if not name.startswith(("jax_", "torch_", "_"))
    ]
    script = f"""
import sys
sys.modules["jax"] = None
for module in {modules!r}: __import__(module)
"""
    done = call(sys.executable, "-W", "ignore", "-c", script)
    assert done.returncode == 0, done.stderr


def test_the_top_package_imports_nothing_until_it_is_asked() -> None:
    script = "import skerry, sys; assert not {'jax', 'numpy', 'nats'} & {*sys.modules}; skerry.join"
    done = call(sys.executable, "-W", "ignore", "-c", script)
    assert done.returncode == 0, done.stderr


def test_the_absence_of_a_module_is_noticed() -> None:
    """Guards the test above: the learner cannot do without JAX."""
    with pytest.raises(AssertionError, match="jax"):
        import_all("skerry_learner", HEAVY)


@pytest.mark.parametrize("package", PACKAGES)
def test_init_files_hold_a_docstring_only(root: Path, package: str) -> None:
    loud: list[Path] = []
    for path in sorted((root / PACKAGES[package]).rglob("__init__.py")):
        if "v1" in path.parts or path == root / "shared/skerry/__init__.py":
            continue  # the top offers what a program of one's own needs
        body = ast.parse(path.read_text()).body
        silent = len(body) == 1 and isinstance(body[0], ast.Expr)
        if not (silent and isinstance(ast.literal_eval(ast.unparse(body[0])), str)):
            loud.append(path)
    assert loud == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package_and_each_package_is_typed(
    root: Path, package: str
) -> None:
    top = root / PACKAGES[package]
    folders = {path.parent for path in top.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert (top / "py.typed").is_file()
