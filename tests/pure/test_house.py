"""House rules: imports point one way, things stay small, nothing branches on a stage number, no machine leaks in."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "onecopy"
SOURCES = sorted(SRC.rglob("*.py"))
ALL_PYTHON = sorted(p for top in ("src", "tests", "benchmarks", "examples") for p in (ROOT / top).rglob("*.py"))

# A package may import those named here, itself, and onecopy.errors. What is not listed is free (cli, train, ...).
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "plan": set(),
    "schedule": {"plan", "codecs"},
    "codecs": {"plan"},
    "tiers": {"plan", "schedule", "codecs"},
    "comm": {"plan", "schedule", "codecs"},
    "cluster": set(),
    "templates": {"plan"},
    "planner": {
        "plan", "schedule", "codecs", "comm", "engine", "optim", "report", "cluster", "recipes", "place", "templates",
    },
    "engine": {"plan", "schedule", "codecs", "tiers", "comm", "optim", "report", "checkpoint", "cluster", "recipes"},
}
WITHOUT_DISTRIBUTED = ("plan", "schedule", "errors")
STAGE_WORDS = re.compile(r"^(zero_?)?stage(_?(number|id|no))?$")
MAY_BRANCH_ON_STAGE = {SRC / "plan" / "presets.py", SRC / "plan" / "config.py"}

PUBLIC = {
    "initialize", "deferred", "gathered", "stage", "hsdp", "mics", "load_config", "Plan", "Units",
    "full_param", "full_grad", "full_state", "set_full_param", "set_full_grad", "set_full_state", "errors",
}  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def package(path: Path) -> str:
    """The part of onecopy a file belongs to: its folder or, at the top, its own name."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def modules_imported(path: Path) -> Iterator[str]:
    """Absolute names of everything imported, in functions and under TYPE_CHECKING too."""
    here = ["onecopy", *path.relative_to(SRC).with_suffix("").parts]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def attributes_on_self(node: ast.ClassDef) -> set[str]:
    """Names assigned on ``self`` in any method, and dataclass fields."""
    names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and isinstance(inner.value, ast.Name):
            names |= {inner.attr} if inner.value.id == "self" else set()
    return names


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in SOURCES if package(p) in MAY_IMPORT], ids=label)
def test_imports_point_one_way(path: Path) -> None:
    own = package(path)
    allowed = MAY_IMPORT[own] | {own, "errors"}
    for name in modules_imported(path):
        parts = name.split(".")
        if parts[0] == "onecopy":
            assert len(parts) > 1, f"{label(path)} imports the public package, whose imports point down"
            assert parts[1] in allowed, f"{label(path)} imports {name}; {own} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", [p for p in SOURCES if package(p) in WITHOUT_DISTRIBUTED], ids=label)
def test_plan_and_schedule_are_pure_data(path: Path) -> None:
    assert not [name for name in modules_imported(path) if name.startswith("torch.distributed")]
    uses = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute) and n.attr == "distributed"]
    assert not uses, f"line {uses[0].lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_nothing_branches_on_a_stage_number(path: Path) -> None:
    if path in MAY_BRANCH_ON_STAGE:
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                continue  # "was one given at all?" is no branch on which one
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            operands = [node.test]
        else:
            continue
        for operand in operands:
            word = operand.id if isinstance(operand, ast.Name) else getattr(operand, "attr", "")
            assert not STAGE_WORDS.match(word), f"{label(path)}:{node.lineno} branches on {word!r}"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=label)
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines < 500, f"{label(path)} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_functions_classes_and_constructors_are_small(path: Path) -> None:
    wrong = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length >= 60:
                wrong.append(f"{node.name} at line {node.lineno} has {length} lines, at most 59")
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
            if node.name == "__init__" and count >= 8:
                wrong.append(f"constructor at line {node.lineno} has {count} arguments, at most 7")
        if isinstance(node, ast.ClassDef) and len(names := attributes_on_self(node)) >= 15:
            wrong.append(f"class {node.name} has {len(names)} attributes, at most 14: {sorted(names)}")
    assert not wrong, f"{label(path)}: " + "; ".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_no_exception_is_swallowed(path: Path) -> None:
    """A bare ``except`` or an ``except Exception: pass`` hides wrong numbers."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            silent = all(isinstance(inner, ast.Pass | ast.Continue) for inner in node.body)
            assert not (broad and silent), f"{label(path)}:{node.lineno} swallows every exception"
            assert node.type is not None, f"{label(path)}:{node.lineno} is a bare except"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_everything_public_is_documented_and_typed(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module) or not module.body, f"{label(path)} has no docstring"
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{label(path)}:{node.lineno} {node.name} has no docstring"
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            bare = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.annotation is None]
            assert not set(bare) - {"self", "cls"}, f"{label(path)}:{node.lineno} {node.name}: no type for {bare}"
            assert node.returns is not None, f"{label(path)}:{node.lineno} {node.name} has no return type"


def test_no_machine_path_is_in_the_repository() -> None:
    pattern = re.compile(r"/(" + "|".join(("wo" + "rk", "tm" + "p/w", "ro" + "ot", "ho" + "me/[a-z]")) + r")/")
    texts = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".md", ".toml", ".json", ".yml", ".txt", ".cfg"}]
    texts += [p for name in ("Makefile", ".ci/run") if (p := ROOT / name).exists()]
    skipped = {".git", ".venv", "runs", "build", "dist", ".hypothesis", ".pytest_cache", "node_modules"}
    for path in texts:
        if skipped.isdisjoint(path.relative_to(ROOT).parts):
            found = pattern.search(path.read_text(errors="replace"))
            assert not found, f"{label(path)} names {found.group()!r}"


@pytest.mark.skipif(not (SRC / "__init__.py").exists(), reason="the package has no public page yet")
def test_the_public_page() -> None:
    onecopy = importlib.import_module("onecopy")
    names = set(onecopy.__all__)
    assert names >= PUBLIC, f"missing: {sorted(PUBLIC - names)}"
    for name in names:
        thing = getattr(onecopy, name)
        if not name.startswith("__"):
            assert inspect.getdoc(thing), f"onecopy.{name} has no docstring"
    shown = {n for n, v in vars(onecopy).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert shown - {"annotations"} <= names, f"reachable but not on the page: {sorted(shown - names)}"
