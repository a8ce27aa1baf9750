"""Break one random line at a time, and see whether the tests of its module notice. Run: make mutants.

A mutant is caught if a quick test of its module fails, or else a slow one, that passes without it. Its tests are those
that import the module, lie in the folder of its package, or carry the package's name; they run in a copy of the tree,
two mutants at a time. One whose tests take too long, or fail without it, too, is undecided, and counts as survived.
Mutants that change nothing that a program does are listed in scripts/mutants.toml with the reason. Exits 1 below GOAL.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("telemetry/metrics", "telemetry/attribution", "advisor/decisions", "slurm_hooks")
GOAL, MOST_EQUIVALENT, LIMIT_S, AT_A_TIME = 0.9, 0.1, 150, 2
SWAPS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",), "+": ("-",), "-": ("+",), "*": ("/",),
    "/": ("*",), "//": ("*",), "%": ("*",), "and": ("or",), "or": ("and",),
}  # fmt: skip
# No shrinking: that a test fails is enough.
PLUGIN = """from hypothesis import HealthCheck, Phase, settings
phases = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("mutants", deadline=None, max_examples=20, phases=phases, suppress_health_check=HealthCheck)
"""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def edits(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, str]]:
    """Ways to break a node: a part and the text in its place, or two parts whose operator is swapped."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node.left, node.comparators[0], ""
    elif isinstance(node, ast.BinOp) and not any(is_text(side) for side in (node.left, node.right)):
        yield node.left, node.right, ""
    elif isinstance(node, ast.BoolOp):
        yield from ((*pair, "") for pair in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield node, None, str(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, None, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield node, None, "return None"
    elif isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield node, None, "pass"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but types and decorators, whose change says nothing of the tests."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from walk(each)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Those on one line. Ast counts columns in bytes."""
    source = (ROOT / path).read_bytes()
    lines = source.splitlines()
    for node in walk(ast.parse(source)):
        for first, second, text in edits(node):
            if second is None:
                row, start, end, last = first.lineno, first.col_offset, first.end_col_offset, first.end_lineno
            else:
                row, start, end, last = first.end_lineno, first.end_col_offset, second.col_offset, second.lineno
            if row != last:
                continue
            line = lines[row - 1]
            old, texts = line[start:end].decode(), [text]
            if second is not None:  # keep the brackets around the operands
                swaps = SWAPS.get(old.strip(" ()"), ())
                texts = [re.sub(r"^(\)*)[^()]*(\(*)$", rf"\1 {new} \2", old) for new in swaps]
            for new in texts:
                yield Mutant(path, row, line.decode(), (line[:start] + new.encode() + line[end:]).decode())


def tests_of(path: str) -> list[str]:
    """Nearest first: what imports the module, then its package's folder, then what is named after it."""
    module = path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    pattern = re.compile(
        rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b"
        rf"|from {re.escape(package)} import .*\b{name}\b)", re.M,
    )  # fmt: skip
    near = f"tests/{package.replace('.', '/')}/"
    about = re.compile(rf"_{name if package == 'slurm_hooks' else package.rpartition('.')[2]}s?[_.]")
    ranks = {}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        place = test.relative_to(ROOT).as_posix()
        signs = (
            pattern.search(test.read_text()),
            place.startswith(near) and package != "slurm_hooks",
            about.search(place),
        )
        if any(signs) and "cluster" not in test.parts:
            ranks[place] = ([not sign for sign in signs], test.stat().st_size)
    return sorted(ranks, key=ranks.__getitem__)


def failing(tree: Path, tests: list[str], marks: str, seed: int) -> str:
    """The first test that fails; "" if all pass. Raises TimeoutError, also if a single test hangs."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "mutants_profile", "-m", marks]
    argv += ["--hypothesis-profile=mutants", f"--hypothesis-seed={seed}", "--timeout=60", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "ALMANAC_SHARED_DATA": str(ROOT.parent / "shared/data")}
    with (tree / "output").open("w+") as output:
        run = subprocess.Popen(argv, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            code = run.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        output.seek(0)
        if code in (0, 5):  # 5: none of them has the mark
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", output.read(), re.M)
    if found is None or "Timeout" in (found[2] or ""):
        raise TimeoutError
    return found[1]


def judge(mutant: Mutant, tree: Path, seed: int) -> str:
    source, tests = tree / mutant.path, tests_of(mutant.path)
    whole = source.read_bytes()
    lines = whole.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after.encode() + b"\n"

    def write(content: bytes) -> None:
        source.write_bytes(content)  # same size and second as before: Python would take the compiled file
        Path(importlib.util.cache_from_source(str(source))).unlink(missing_ok=True)

    write(b"".join(lines))
    try:
        for marks in ("not cluster and not slow", "slow and not cluster"):
            test = failing(tree, tests, marks, seed) if tests else ""
            if test:
                write(whole)
                is_sound = not failing(tree, [test], marks, seed)
                return (
                    f"caught {'quickly' if marks.startswith('not') else 'slowly'}, {test}" if is_sound else "UNDECIDED"
                )
        return "SURVIVED"
    except TimeoutError:
        return "UNDECIDED"
    finally:
        write(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after so long")
    parser.add_argument("--only", default="", help="choose from those whose line contains this text")
    given = parser.parse_args()
    paths = [p.relative_to(ROOT).as_posix() for folder in PACKAGES for p in sorted((ROOT / folder).rglob("*.py"))]
    every = [mutant for path in paths for mutant in mutants_of(path) if given.only in str(mutant)]
    chosen = random.Random(given.seed).sample(every, min(given.count, len(every)))
    print(f"seed {given.seed}: {len(chosen)} of {len(every)} mutants", flush=True)
    known = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())["equivalent"]
    reasons = {(each["file"], each["before"], each["after"]): f"equivalent, {each['reason']}" for each in known}
    until_s, trees, counts = time.monotonic() + 60 * given.minutes, SimpleQueue[Path](), Counter[str]()
    for number in range(AT_A_TIME):
        trees.put(copy_tree(ROOT / f"build/mutants/{number}"))

    def run(mutant: Mutant) -> None:
        found = reasons.get((mutant.path, mutant.before.strip(), mutant.after.strip()), "")
        if not found and time.monotonic() < until_s:
            tree = trees.get()
            found = judge(mutant, tree, given.seed)
            trees.put(tree)
        print(f"{found or 'not run'}: {mutant}", flush=True)
        counts[found.partition(",")[0] or "not run"] += 1

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(run, chosen))
    caught = counts["caught quickly"] + counts["caught slowly"]
    share = caught / max(1, caught + counts["SURVIVED"] + counts["UNDECIDED"])
    print(
        *(f"{number} {found}" for found, number in counts.most_common()),
        f"caught {share:.1%} (goal {GOAL:.0%})",
        sep="\n",
    )
    return int(share < GOAL or counts["equivalent"] > MOST_EQUIVALENT * len(chosen))


def copy_tree(tree: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns("build", ".*"))
    (tree / "mutants_profile.py").write_text(PLUGIN)
    (tree / ".venv").symlink_to(sys.prefix)
    return tree


if __name__ == "__main__":
    sys.exit(main())
