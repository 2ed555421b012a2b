"""Mutation testing of the transition table and of the run log's sidecar: `nox -s mutation`.

A mutant is the module with one thing changed: a comparison, a constant, an `and`, a `not`, a condition, a raise. The
tests of that module run on each in a fork; a mutant that no test notices survives and is printed, and so is one whose
tests did not end in time, which counts as noticed. What is printed last is the share that was noticed.
"""

from __future__ import annotations

import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: module -> the tests that must notice, the quickest first
TARGETS = {
    "openjobs/jobs.py": ["tests/unit/test_transitions.py"],
    "openjobs/runlog/state.py": ["tests/unit/test_log_formats.py", "tests/unit/test_runlog.py"],
    "openjobs/runlog/sidecar.py": ["tests/unit/test_log_formats.py", "tests/unit/test_runlog.py"],
}
_COMPARE = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_MOST_S = 150


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Each mutant's description and text."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    places = {id(node) for function in functions for node in ast.walk(function)}
    places |= {
        id(node) for each in tree.body if isinstance(each, ast.Assign | ast.AnnAssign) for node in ast.walk(each)
    }
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in places:
            continue
        for what, change in _changes(node):
            made = copy.deepcopy(tree)
            target = next(each for at, each in enumerate(ast.walk(made)) if at == number)
            change(target)
            yield f"line {getattr(node, 'lineno', '?')}: {what}", ast.unparse(ast.fix_missing_locations(made))


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        other = _COMPARE[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    if isinstance(node, ast.BoolOp):
        other_op = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"-> {other_op.__name__}", lambda n: setattr(n, "op", other_op())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", lambda n: (setattr(n, "op", ast.UAdd()), setattr(n, "operand", _truth(n.operand)))
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"-> {not node.value}", lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        swap = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
        yield f"-> {swap.__name__}", lambda n: setattr(n, "op", swap())
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition turned round", lambda n: setattr(n, "test", ast.UnaryOp(op=ast.Not(), operand=n.test))
    if isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body):
        yield "raise left out", lambda n: setattr(n, "body", [ast.Pass()])


def _truth(value: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[value], keywords=[])


def noticed(directory: Path, tests: list[str]) -> str | None:
    """Why the tests fail on the package in `directory`: "tests" or "time"; None when they pass."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_tested(directory, tests))
        finally:
            os._exit(1)  # nothing of the parent's is ended here
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "time"
    return "tests" if os.WEXITSTATUS(status) else None


def _tested(directory: Path, tests: list[str]) -> int:
    """In the fork: 0 when all pass."""
    signal.alarm(_MOST_S)
    os.chdir(directory)
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # The copy's package and tests, not those that this program was started from.
    sys.path[:] = [str(directory), *(path for path in sys.path if path and Path(path) != ROOT)]
    os.environ["PYTHONPATH"] = str(directory)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("openjobs", "tests")]:
        del sys.modules[name]
    import pytest

    ended = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests])
    return 0 if ended == 0 else 1


def main(*arguments: str) -> int:
    """Arguments: the most mutants of each module (0: all, the default), and modules; without them all."""
    most = int(arguments[0]) if arguments else 0
    chosen = arguments[1:] or tuple(TARGETS)
    for name in ("attrs", "cattrs", "dulwich.repo", "orjson", "psutil", "pytest"):
        importlib.import_module(name)  # once, before the forks

    killed = total = 0
    with tempfile.TemporaryDirectory(prefix="oj-mutants-") as scratch:
        directory = Path(scratch)
        for name in ("openjobs", "tests", "fixtures"):
            shutil.copytree(
                ROOT / name, directory / name, ignore=shutil.ignore_patterns("node_modules", "__pycache__", "static")
            )
        for name in ("pyproject.toml",):
            shutil.copy(ROOT / name, directory / name)
        for module in chosen:
            source = (ROOT / module).read_text()
            made = list(mutants(source))
            if most and len(made) > most:
                made = random.Random(1).sample(made, most)
            began, here = time.monotonic(), 0
            (directory / module).write_text(source)
            assert noticed(directory, TARGETS[module]) is None, f"the tests of {module} fail without a mutant"
            for what, text in made:
                (directory / module).write_text(text)
                why = noticed(directory, TARGETS[module])
                here += why is not None
                if why != "tests":
                    print(f"{module}: {'survived' if why is None else 'ended by time'}: {what}", flush=True)
            (directory / module).write_text(source)
            print(f"{module}: {here} of {len(made)} noticed in {time.monotonic() - began:.0f} s", flush=True)
            killed, total = killed + here, total + len(made)
    print(f"mutation score: {100 * killed / max(total, 1):.1f} % ({killed} of {total})")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
