"""Flip single bits in every kind of file of a store, and run readers on it: none may abort, hang, or show a traceback.

python -m benchmarks.damage STORE [--flips N]   prints a line for each kind of file

Each flip is tried in a forked process on a copy of the store. A change that no reader names must change no value.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from advisor.artefacts import load, load_speeds
from advisor.demand.versions import load_demand, trained_sets
from almanac.errors import AlmanacError, DamageWarning, StoreError
from reports.mail.outbox_file import outbox_path, read_counts
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.damage import faults
from telemetry.store.partitions import Stray, partition_start
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

HANGS_S = 60
CRASHED, HUNG, SEEN, UNSEEN = "aborted", "hung", "seen", "changed nothing"
WRONG, TRACEBACK = "OTHER VALUES, unseen", "traceback"
BAD = (CRASHED, HUNG, WRONG, TRACEBACK)
_CODES = {0: SEEN, 3: UNSEEN, 4: WRONG, 5: TRACEBACK}


@dataclass(frozen=True)
class Flip:
    """One bit of a file."""

    kind: str
    path: Path
    place: int
    bit: int


def flips(store: Path, number: int, at: random.Random) -> Iterator[Flip]:
    """Half of them in footers and headers of tables, each byte of one footer once, the others anywhere."""
    tables = sorted(path for name in TABLES for path in (store / name).glob("*/*/*.parquet"))
    others = sorted(path for path in store.rglob("*") if path.is_file() and path.suffix in (".json", ".txt", ".sqlite"))
    others += sorted((store / "models").rglob("current"))
    first = min(tables, key=_footer)
    size, footer = first.stat().st_size, _footer(first)
    yield from (Flip("each byte of a footer", first, place, at.randrange(8)) for place in range(size - footer, size))
    for _ in range(number // 2):
        path = at.choice(tables)
        size, footer = path.stat().st_size, _footer(path)
        yield Flip("footer or header", path, at.choice([*range(4), *range(size - footer, size)]), at.randrange(8))
    for _ in range(number // 4):
        path = at.choice(tables)
        yield Flip("content of tables", path, at.randrange(path.stat().st_size), at.randrange(8))
    for _ in range(number - number // 2 - number // 4):
        path = at.choice(others)
        if path.stat().st_size:
            yield Flip(f"{path.suffix or path.name} files", path, at.randrange(path.stat().st_size), at.randrange(8))


def _footer(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[-8:-4], "little") + 8


def observed(root: Path, path: Path) -> tuple[bool, object]:
    """Return True if damage was named, and the values that readers take from files of the path's kind."""
    named: list[Stray] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DamageWarning)
        try:
            store = Store.open(root, threads=1, on_strays=named.extend)
            of = store.of(store.clusters()[0])
            values = list(_of_table(of, path) if path.suffix == ".parquet" else _of_state(of))
        except AlmanacError:
            return True, None
    return bool(named or caught), values


def _of_table(of: ClusterStore, path: Path) -> Iterator[object]:
    table = path.parents[2].name
    start_s = partition_start(path)
    yield of.read(table, since_s=start_s, until_s=start_s + TABLES[table].part_s).to_pydict()
    if fault := faults([path], {path}):
        raise StoreError(f"{path}: {fault[path]}")


def _of_state(of: ClusterStore) -> Iterator[object]:
    yield from (of.forgotten(), of.watermarks(), of.peek_open_days(), load_speeds(of.models_dir))
    yield read_counts(outbox_path(of.root))
    trained = load(of.models_dir)
    if trained and trained.model:
        yield trained.model.texts, trained.model.weights, trained.model.vocabularies, trained.model.margins
        yield trained.site.to_json(), trained.calibration, trained.waits, trained.trained_s
    yield from (load_demand(of.models_dir, name) for name in trained_sets(of.models_dir))


def in_child(root: Path, path: Path, good: str) -> tuple[int, str]:
    """Observe in a forked process: this one starts no threads. Returns its wait status, and what it saw."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(HANGS_S)
        try:
            is_named, values = observed(root, path)
            digest = hashlib.sha256(repr(values).encode()).hexdigest()
            os.write(writer, digest.encode())
            os._exit(0 if is_named else 3 if digest == good else 4)
        except BaseException as error:
            os.write(writer, repr(error)[:2000].encode())
            os._exit(5)
    os.close(writer)
    with open(reader, "rb") as said:  # noqa: PTH123 - of a descriptor
        text = said.read().decode()
    return os.waitpid(child, 0)[1], text


def outcome(flip: Flip, root: Path, good: str) -> tuple[str, str]:
    """Return what became of one flip, and what its reader said."""
    content = flip.path.read_bytes()
    spoiled = bytearray(content)
    spoiled[flip.place] ^= 1 << flip.bit
    flip.path.write_bytes(spoiled)
    status, said = in_child(root, flip.path, good)
    flip.path.write_bytes(content)
    if os.WIFSIGNALED(status):
        return (HUNG if os.WTERMSIG(status) == signal.SIGALRM else CRASHED), said
    return _CODES.get(os.WEXITSTATUS(status), TRACEBACK), said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--flips", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(shutil.copytree(given.store, Path(folder) / "store"))
        good: dict[Path, str] = {}
        for flip in flips(root, given.flips, random.Random(given.seed)):
            one = flip.path if flip.path.suffix == ".parquet" else root
            if one not in good:
                status, good[one] = in_child(root, flip.path, "")
                if os.waitstatus_to_exitcode(status) != 4:
                    print(f"{flip.path} is damaged before any flip: {good[one]}", file=sys.stderr)
                    return 1
            result, said = outcome(flip, root, good[one])
            found[flip.kind, result] += 1
            if result in BAD:
                print(f"{result}: {flip} {said}", file=sys.stderr, flush=True)
    for (kind, result), number in sorted(found.items()):
        print(f"{kind:24} {result:24} {number}")
    return int(any(result in BAD for _, result in found))


if __name__ == "__main__":
    sys.exit(main())
