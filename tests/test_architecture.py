"""How the code is laid out, held by a test: who may import whom, how long anything may be, where tasks are made."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "gateway").rglob("*.py"))

MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 80
TOP_LEVEL = re.compile(r"setup\.cfg|setup\.py|gateway|tests|deploy|Makefile|README\.md|LICENSE|CHANGES\.md|\..+")

# core decides: what it needs of the world comes in as an argument
NOT_IN_CORE = {"asyncio", "aiohttp", "socket", "time", "random", "os", "logging"}
MAY_IMPORT_CONFIG = {"gateway.app", "gateway.cli", "gateway.control.reload", "gateway.config"}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


def imports(path: str) -> Iterator[str]:
    """The modules that a file imports; `from gateway.core import sse` is gateway.core.sse."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


@functools.cache
def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def forbidden(module: str, target: str) -> str | None:
    """Why `module` must not import `target`, if so."""
    ours = within(target, "gateway") and target != "gateway"
    if ours and module == "gateway.errors" and target != "gateway.core.outcome":
        return "errors imports core.outcome only"
    if within(module, "gateway.core"):
        if ours and not within(target, "gateway.core", "gateway.errors"):
            return "core imports only core and errors"
        if target.split(".")[0] in NOT_IN_CORE:
            return f"core knows nothing of {target}"
    if ours and within(module, "gateway.net") and not within(target, "gateway.core", "gateway.errors", "gateway.net"):
        return "net imports core and errors: it is handed an observer, and its settings"
    if within(target, "gateway.config") and module not in MAY_IMPORT_CONFIG:
        return "only app, cli and control/reload know the configuration"
    return None


@pytest.mark.parametrize("path", SOURCES)
def test_imports(path: str) -> None:
    module = module_name(path)
    wrong = {f"{module} imports {target}: {why}" for target in imports(path) if (why := forbidden(module, target))}
    assert not wrong, "\n".join(sorted(wrong))


def test_the_rules_themselves() -> None:
    """They forbid what they are there to forbid."""
    assert forbidden("gateway.core.sse", "gateway.net.relay")
    assert forbidden("gateway.core.sse", "asyncio")
    assert forbidden("gateway.core.dialects.openai", "os.path")
    assert forbidden("gateway.errors", "gateway.core.sse")
    assert forbidden("gateway.net.relay", "gateway.telemetry.metrics")
    assert forbidden("gateway.net.relay", "gateway.config")
    assert forbidden("gateway.control.admin", "gateway.config")
    assert not forbidden("gateway.core.sse", "gateway.core.framing")
    assert not forbidden("gateway.core.headers", "multidict")
    assert not forbidden("gateway.errors", "gateway.core.outcome")
    assert not forbidden("gateway.net.relay", "asyncio")
    assert not forbidden("gateway.control.reload", "gateway.config")
    assert not forbidden("gateway.cli", "gateway")


@pytest.mark.parametrize("path", SOURCES)
def test_lengths(path: str) -> None:
    lines = (ROOT / path).read_text().count("\n")
    assert lines <= MOST_LINES, f"{path} has {lines} lines"
    long = {
        f"{path}:{node.lineno} {node.name} has {length} lines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and (length := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
    }
    assert not long, "\n".join(sorted(long))


def task_makers(code: ast.AST) -> Iterator[int]:
    """The lines that make a task which nobody need ever wait for. A task group waits for its own."""
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            if any(alias.name in ("create_task", "ensure_future") for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future"):
            owner = ast.unparse(node.value)
            if owner == "asyncio" or re.search(r"loop(\(\))?$", owner):
                yield node.lineno


@pytest.mark.parametrize("path", [path for path in SOURCES if path != "gateway/net/tasks.py"])
def test_tasks_are_made_in_one_place(path: str) -> None:
    assert not list(task_makers(tree(path))), f"{path}: tasks are made by gateway/net/tasks.py"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("asyncio.create_task(f())", True),
        ("asyncio.ensure_future(f())", True),
        ("from asyncio import create_task", True),
        ("asyncio.get_running_loop().create_task(f())", True),
        ("self._loop.create_task(f())", True),
        ("group.create_task(f())", False),
    ],
)
def test_the_search_for_tasks_itself(code: str, found: bool) -> None:
    assert bool(list(task_makers(ast.parse(code)))) is found


def test_top_level() -> None:
    """What git would take; without git, what is there but what building leaves behind."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    else:
        names = {path.name for path in ROOT.iterdir() if path.name != "build" and path.suffix != ".egg-info"}
    assert not (extra := {name for name in names if not TOP_LEVEL.fullmatch(name)}), f"at the top level: {extra}"
