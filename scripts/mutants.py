"""Break one random line at a time, and see whether the tests notice. Run: make mutants.

In a copy of the tree the tests are loaded, and the quick ones run once to record which reach which line. Each mutant
is then tried in a fork of that process, which runs the broken module again. The broken file is also written to the
copy of the tree, for processes that tests start. Tests that reach the line come first, quickest first, then the others
of its package, and slow ones last. A mutant is caught if a test fails, or hangs, that passes without it. Mutants that
change nothing that a program does are listed in scripts/mutants.toml with the reason. Exits 1 below GOAL.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build/mutants"
PACKAGES = ("telemetry/metrics", "telemetry/attribution", "advisor", "slurm_hooks")
GOAL, MOST_EQUIVALENT, LIMIT_S = 0.9, 0.1, 150
SWAPS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",), "+": ("-",), "-": ("+",), "*": ("/",),
    "/": ("*",), "//": ("*",), "%": ("*",), "and": ("or",), "or": ("and",),
}  # fmt: skip
IMPORTS = re.compile(rf"^\s*(from|import) ({'|'.join(PACKAGES)})\b".replace("/", r"\."), re.M)
# No shrinking: that a test fails is enough.
PROFILE = """from hypothesis import HealthCheck, Phase, settings
phases = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("mutants", deadline=None, max_examples=20, phases=phases, suppress_health_check=HealthCheck)
"""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    before: str
    after: str
    is_in_function: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"

    def write(self, text: str) -> None:
        """Put this text in the place of the line."""
        path = TREE / self.path
        lines = path.read_bytes().split(b"\n")
        lines[self.line - 1] = text.encode()
        path.write_bytes(b"\n".join(lines))
        # Same size and second as before: Python would take the compiled file.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def edits(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, str]]:
    """Ways to break a node: a part and the text in its place, or two parts whose operator is swapped."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node.left, node.comparators[0], ""
    elif isinstance(node, ast.BinOp) and not any(is_text(side) for side in (node.left, node.right)):
        yield node.left, node.right, ""
    elif isinstance(node, ast.BoolOp):
        yield from ((*pair, "") for pair in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        new = not node.value if isinstance(node.value, bool) else node.value + 1
        yield from [(node, None, str(new))] if new != node.value else []
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield node.test, None, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) not in ("None", "False", "''"):
        yield node, None, "return None"
    elif isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield node, None, "pass"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but types and decorators, whose change says nothing of the tests, and what only checks us."""
    if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from walk(each)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield the mutants of a file that change one line only. Ast counts columns in bytes."""
    source = (ROOT / path).read_bytes()
    lines, tree = source.splitlines(), ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {number for each in functions for number in range(each.body[0].lineno, (each.end_lineno or 0) + 1)}
    for node in walk(tree):
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
                after = (line[:start] + new.encode() + line[end:]).decode()
                yield Mutant(path, row, line.decode(), after, row in inner)


def renew(path: str) -> None:
    """Run the changed module again. Its functions and classes stay the same objects and take over the new code."""
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if name not in sys.modules:
        return
    new = vars(sys.modules[name])
    old = dict(new)
    exec(compile((TREE / path).read_bytes(), str(TREE / path), "exec"), new)
    for each in old.keys() & new.keys():
        new[each] = renewed(old[each], new[each])
    for user in [user for user in list(sys.modules.values()) if imports_from(user, name)]:
        for each in [each for each, value in vars(user).items() if each in old and value is old[each]]:
            setattr(user, each, new[each])


def renewed(old: object, new: object) -> object:
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        renewed(getattr(old, "__wrapped__", None), getattr(new, "__wrapped__", None))
        return old
    if isinstance(old, type) and not hasattr(old, "__struct_fields__"):  # msgspec's keep theirs in C
        for name, value in vars(new).items():
            if not isinstance(value, (MemberDescriptorType, GetSetDescriptorType)):
                with suppress(AttributeError, TypeError):
                    setattr(old, name, renewed(vars(old).get(name), value))
        return old
    return new


def imports_from(module: ModuleType, name: str) -> bool:
    path = Path(getattr(module, "__file__", None) or "/")
    return path.is_relative_to(TREE) and f"from {name} import" in path.read_text()


class Judge:
    """A plugin of pytest that tries each mutant in place of running the tests once."""

    def __init__(self, mutants: list[Mutant], until_s: float) -> None:
        self.mutants, self.until_s, self.found = mutants, until_s, Counter[str]()
        self.items: dict[str, pytest.Item] = {}
        self.spent_s: dict[str, float] = {}
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent_s[report.nodeid] = self.spent_s.get(report.nodeid, 0.0) + report.duration
        self.has_failed = self.has_failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("the tests cannot be loaded")
        session.config.pluginmanager.unregister(name="terminalreporter")
        self.items = {item.nodeid: item for item in session.items}
        began_s = time.monotonic()
        in_copy(self._record)
        self.spent_s |= json.loads((TREE / "spent").read_text())
        say = partial(print, file=sys.__stdout__, flush=True)  # the tests' output is taken
        say(f"{len(self.spent_s)} quick tests recorded in {time.monotonic() - began_s:.0f} s")
        reach = coverage.CoverageData(str(TREE / "reach"))
        reach.read()
        for mutant in self.mutants:
            found = "not run"
            if time.monotonic() < self.until_s:
                lines = reach.contexts_by_lineno(str(TREE / mutant.path))
                some = lines.get(mutant.line, []) if mutant.is_in_function else [*chain(*lines.values())]
                found = self._judge(mutant, some)
            self.found[found.partition(" by ")[0]] += 1
            say(f"{found}: {mutant}")
        return True

    def _record(self) -> None:
        record = coverage.Coverage(str(TREE / "reach"), config_file=False, source=PACKAGES)
        record.start()
        names = [name for name, item in self.items.items() if not item.get_closest_marker("slow")]
        while names and (failed := self._run(names, record.switch_context)):
            del self.spent_s[failed]
            names = names[names.index(failed) + 1 :]
        record.stop()
        record.save()
        (TREE / "spent").write_text(json.dumps(self.spent_s))

    def _run(self, names: list[str], before: Callable[[str], object]) -> str:
        """Run tests until one fails; return its name. before: told the name of each."""
        self.has_failed = False
        for name, later in zip_longest(names, names[1:]):
            before(name)
            item = self.items[name]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=self.items.get(later))
            if self.has_failed:
                return name
        return ""

    def _judge(self, mutant: Mutant, reaching: Iterable[str], unsound: tuple[str, ...] = ()) -> str:
        path = Path(mutant.path)

        def far(name: str) -> tuple[bool, bool, float]:
            spent_s = self.spent_s.get(name, math.inf)
            return path.stem not in name.partition("::")[0], spent_s == math.inf, spent_s

        near = sorted(self.spent_s.keys() & set(reaching), key=self.spent_s.__getitem__)
        own = sorted((name for name in self.items if name.startswith(f"tests/{path.parent}/")), key=far)
        names = [name for name in dict.fromkeys([*near, *own]) if name not in unsound]
        mutant.write(mutant.after)
        failed = self._first_failing(names, mutant)
        mutant.write(mutant.before)
        if failed and self._first_failing([failed], mutant):  # without the mutant, too
            return self._judge(mutant, reaching, (*unsound, failed))
        return f"caught by {failed}" if failed else "SURVIVED"

    def _first_failing(self, names: list[str], mutant: Mutant) -> str:
        """With the module as it stands in the tree. A test that hangs fails, too."""
        place, until_s = TREE / "failed", time.monotonic() + LIMIT_S

        def work() -> None:
            renew(mutant.path)
            place.write_text(self._run(names, begin))

        def begin(name: str) -> None:
            if time.monotonic() > until_s:
                place.write_text("")
                os._exit(0)
            place.write_text(name)
            signal.alarm(30 + round(20 * self.spent_s.get(name, 5.0)))

        place.write_text(names[0] if names else "")  # a module that cannot run fails every test
        in_copy(work)
        return place.read_text()


def in_copy(work: Callable[[], None]) -> None:
    """Do it in a copy of this process, and end what it leaves."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for handle in (1, 2):
                os.dup2(os.open(TREE / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        os.waitpid(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def tests_that_import() -> list[str]:
    return [str(p) for p in sorted(Path("tests").rglob("test_*.py")) if IMPORTS.search(p.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=60, help="start no mutant after so long")
    parser.add_argument("--only", default="", help="choose from those whose line matches this pattern")
    given = parser.parse_args()
    until_s = time.monotonic() + 60 * given.minutes
    paths = [p.relative_to(ROOT).as_posix() for folder in PACKAGES for p in sorted((ROOT / folder).rglob("*.py"))]
    every = [mutant for path in paths for mutant in mutants_of(path) if re.search(given.only, str(mutant))]
    # By its own text, so that a change elsewhere leaves it among the chosen.
    rank = {each: random.Random(f"{given.seed} {each.path} {each.before} {each.after}").random() for each in every}
    chosen = sorted(every, key=rank.__getitem__)[: given.count]
    print(f"seed {given.seed}: {len(chosen)} of {len(every)} mutants", flush=True)
    known = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())["equivalent"]
    reasons = {(each["file"], each["before"], each["after"]): each["reason"] for each in known}
    equal = {each: reasons.get((each.path, each.before.strip(), each.after.strip()), "") for each in chosen}
    for mutant in filter(equal.get, chosen):
        print(f"equivalent, {equal[mutant]}: {mutant}")
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, symlinks=True, ignore=shutil.ignore_patterns("build", ".*"))
    (TREE / "mutants_profile.py").write_text(PROFILE)
    (TREE / ".venv").symlink_to(sys.prefix)
    os.environ |= {"PYTHONPATH": str(TREE), "ALMANAC_SHARED_DATA": str(ROOT.parent / "shared/data")}
    sys.path.insert(0, str(TREE))
    os.chdir(TREE)
    judge = Judge([each for each in chosen if not equal[each]], until_s)
    tests = tests_that_import()
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "mutants_profile", "-m", "not cluster"]
    options += ["--hypothesis-profile=mutants", f"--hypothesis-seed={given.seed}", "--timeout=0", "--capture=sys"]
    if pytest.main([*options, *tests], plugins=[judge]):
        return 1
    share = judge.found["caught"] / max(1, judge.found.total() - judge.found["not run"])
    print(*(f"{number} {found}" for found, number in judge.found.most_common()), sep="\n")
    print(f"caught {share:.1%} (goal {GOAL:.0%})")
    return int(share < GOAL or len(judge.mutants) < (1 - MOST_EQUIVALENT) * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
