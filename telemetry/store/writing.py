"""Writing rows of a table: into memory or a private file first, then into each partition file, by key or by owner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from almanac.atomic import state_of, writing
from almanac.errors import StoreError
from telemetry.store.database import arrow, names_sql, spill_folder
from telemetry.store.forgotten import Forgotten
from telemetry.store.partitions import by_partition, read_partition, with_columns, write_partition
from telemetry.store.progress import ImportedFiles, PartitionChange, StaleRun
from telemetry.store.schema import Table

_MOST_CODES = 2**62


@dataclass(frozen=True)
class WriteResult:
    """Counts of the rows of one write; rows given twice within it count once.

    left_out: rows whose file is damaged, and so stays as it is.
    """

    added: int = 0
    unchanged: int = 0
    replaced: int = 0
    left_out: int = 0

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def conform(rows: pa.Table, spec: Table) -> pa.Table:
    """Rows with the columns of the table, null where they are missing. Raises StoreError, also for null keys.

    Dictionary-encoded text stays so.
    """
    unknown = set(rows.column_names) - set(spec.schema.names)
    if unknown:
        raise StoreError(f"{spec.name}: unknown columns {sorted(unknown)}", f"expected some of {spec.schema.names}")
    table = with_columns(rows, spec)
    for name in {*spec.key, spec.time_column}:
        if table[name].null_count:
            raise StoreError(f"{spec.name}: {table[name].null_count} rows without {name}", "the source must drop these")
    return table.cast(pa.schema([_encoded(field, table[field.name].type) for field in spec.schema]))


def _encoded(field: pa.Field[Any], given: pa.DataType) -> pa.Field[Any]:
    is_kept = pa.types.is_string(field.type) and pa.types.is_dictionary(given)
    return field.with_type(pa.dictionary(pa.int32(), pa.string())) if is_kept else field


def merge(
    db: duckdb.DuckDBPyConnection, spec: Table, path: Path, rows: pa.Table
) -> tuple[pa.Table | None, WriteResult]:
    """The file's rows with `rows` merged in by key, in order; None if nothing changes.

    A newer row wins over an older one, and a null never erases a known value. If several given rows have one key, each
    column keeps its last known value, or in telemetry its greatest. So the order of given samples does not matter.
    """
    new, is_repeat = _in_order(spec, rows)
    if is_repeat.any():
        db.register("given", rows)
        new, _ = _in_order(spec, arrow(db, _one_of_each(spec)))
    new = new.cast(spec.schema)
    if not path.exists():
        return new, WriteResult(added=new.num_rows)
    old = read_partition(spec, path)
    if old.equals(new):
        return None, WriteResult(unchanged=new.num_rows)
    together, is_repeat = _in_order(spec, pa.concat_tables([old, new]))
    known, added = int(is_repeat.sum()), new.num_rows - int(is_repeat.sum())
    if not known:
        return together, WriteResult(added=added)
    is_repeated = np.append(is_repeat[1:], False)
    old, new = together.filter(pa.array(is_repeated)), together.filter(pa.array(is_repeat))
    differs = [_differs(old[name], new[name]) for name in spec.schema.names]
    replaced = int(np.any(differs, axis=0).sum())
    result = WriteResult(added=added, unchanged=known - replaced, replaced=replaced)
    if not (added or replaced):
        return None, result
    single = together.filter(pa.array(~(is_repeat | is_repeated)))
    pairs = [pc.coalesce(new[name], old[name]) for name in spec.schema.names]
    merged = pa.concat_tables([single, pa.Table.from_arrays(pairs, schema=spec.schema)])
    return _in_order(spec, merged)[0], result


def _in_order(spec: Table, rows: pa.Table) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
    """Rows in the order of the table's files, and flags of those whose key is that of the row before.

    Rows with the same key keep their order. Text can be dictionary-encoded.
    """
    code = _codes(spec, rows)
    if (code[1:] < code[:-1]).any():
        order = np.argsort(code, kind="stable")
        rows, code = rows.combine_chunks().take(order), code[order]
    return rows, np.append(np.zeros(min(1, len(code)), dtype=bool), code[1:] == code[:-1])


def _codes(spec: Table, rows: pa.Table) -> npt.NDArray[np.int64]:
    """One integer per row, in the same order as the columns of the table's order: sorting by several texts is slow."""
    code, size = np.zeros(rows.num_rows, dtype=np.int64), 1
    for name in spec.order:
        own: Any = rows[name].combine_chunks().dictionary_encode()
        rank = np.asarray(pc.rank(own.dictionary, tiebreaker="dense")).astype(np.int64)
        if size * (len(rank) + 1) > _MOST_CODES:
            distinct, code = np.unique(code, return_inverse=True)
            size = len(distinct)
        size *= len(rank) + 1
        code = code * (len(rank) + 1) + rank[np.asarray(own.indices)]
    return code


def _one_of_each(spec: Table) -> str:
    """One row per key of `given`."""
    rest = [field for field in spec.schema if field.name not in spec.key]
    if spec.is_unordered:
        values, source = greatest_sql(rest), "given"
    else:
        values = ", ".join(f'last("{c.name}" ORDER BY seq) FILTER ("{c.name}" IS NOT NULL) AS "{c.name}"' for c in rest)
        source = "(SELECT *, row_number() OVER () AS seq FROM given)"
    grouped = f"SELECT {names_sql(spec.key)}, {values} FROM {source} GROUP BY {names_sql(spec.key)}"
    return f"SELECT {names_sql(spec.schema.names)} FROM ({grouped})"


def _differs(old: Any, new: Any) -> npt.NDArray[np.bool_]:
    """Flags of the values of a column that are known, and not the old ones. NaN equals NaN."""
    if pa.types.is_nested(new.type):
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.array([value is not None and value != known for known, value in pairs], dtype=bool)
    is_same = pc.fill_null(pc.equal(old, new), False)
    if pa.types.is_floating(new.type):
        is_same = pc.or_(is_same, pc.fill_null(pc.and_(pc.is_nan(old), pc.is_nan(new)), False))
    return np.array(new.is_valid().to_numpy() & ~is_same.to_numpy(), dtype=bool)


def replace(
    db: duckdb.DuckDBPyConnection, spec: Table, path: Path, rows: pa.Table, owners: pa.Table
) -> pa.Table | None:
    """The file's rows with `rows` in place of those of the owners, in order; None where nothing changes.

    owners: values of some columns of the key; every row that has one of them goes.
    """
    rows = rows.cast(spec.schema)
    if not path.exists():
        return _in_order(spec, rows)[0] if rows.num_rows else None
    old = read_partition(spec, path)
    db.register("old", old)
    db.register("owners", owners)
    kept = arrow(db, f"SELECT * FROM old ANTI JOIN owners USING ({names_sql(owners.column_names)})")
    replaced, _ = _in_order(spec, pa.concat_tables([kept.cast(spec.schema), rows]))
    return None if replaced.equals(old) else replaced


def greatest_sql(fields: Sequence[pa.Field[pa.DataType]]) -> str:
    """The greatest value of each column among rows with one key; null without a value. NaN is no value."""

    def is_known(field: pa.Field[pa.DataType]) -> str:
        return f'NOT isnan("{field.name}")' if pa.types.is_floating(field.type) else "true"

    return ", ".join(f'max("{field.name}") FILTER ({is_known(field)}) AS "{field.name}"' for field in fields)


_MOST_IN_MEMORY = 1_000_000
"""Rows: about 130 MB of telemetry."""
_MOST_ROWS = 30_000_000
"""About 4 GB of telemetry on disk."""
Opens = Callable[[int], Iterable[int | StaleRun]]
"""Gives the days since 1970, and the runs, that a partition that starts then (s) makes stale when it changes."""


def opens_nothing(start_s: int) -> Iterable[int | StaleRun]:
    return ()


class WritableStore(Protocol):
    """The part of a `ClusterStore` that a writer needs."""

    @property
    def root(self) -> Path: ...

    def lock(self) -> AbstractContextManager[None]: ...

    def connect(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]: ...

    def forgotten(self) -> Forgotten: ...

    def partition(self, spec: Table, start_s: int) -> Path: ...

    def is_damaged(self, path: Path) -> bool: ...

    def reopen(self, days: Iterable[int | StaleRun]) -> None: ...

    def imported_files(self) -> ImportedFiles: ...


class PartitionWriter:
    """Rows of one table that wait to be written, so that each of its partition files is replaced once.

    Those that do not fit in memory are in one private file. Rows that are never written are lost.
    file_key: of the telemetry file that the rows come from; see `ImportedFiles`.
    """

    def __init__(self, store: WritableStore, spec: Table, file_key: str | None = None) -> None:
        self.spec, self._store, self._file_key = spec, store, file_key
        self._is_first = True
        self._in_memory: dict[int, list[pa.Table]] = {}
        self._on_disk: dict[int, list[tuple[int, int]]] = {}
        self._rows_in_memory = self._rows = 0
        self._stack = contextlib.ExitStack()
        self._path: Path | None = None

    def __enter__(self) -> PartitionWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def is_empty(self) -> bool:
        """True if no rows wait."""
        return not self._rows

    @property
    def is_full(self) -> bool:
        """True if the rows must be written before more are added."""
        return self._rows >= _MOST_ROWS or self._rows_in_memory >= _MOST_IN_MEMORY

    def add(self, rows: pa.Table) -> None:
        """Keep rows. Columns that are missing are null. Raises StoreError, also for null keys."""
        for start_s, chosen in by_partition(self.spec, conform(rows, self.spec)):
            self._in_memory.setdefault(start_s, []).append(chosen)
        self._rows += rows.num_rows
        self._rows_in_memory += rows.num_rows
        if self._rows_in_memory >= _MOST_IN_MEMORY:
            self._spill()

    def write(self, opens: Opens = opens_nothing) -> WriteResult:
        """Merge the rows into their partition files, and forget them. Raises StoreError.

        Days are opened just before the file changes that opens them. Rows of damaged files are left out, and counted.
        """
        result, opened, changes = WriteResult(), set[int | StaleRun](), dict[int, PartitionChange]()
        with self._store.lock(), self._store.connect() as db:
            forgotten = self._store.forgotten()
            for start_s, given in self._parts():
                rows = forgotten.without(self.spec.name, given)
                if not rows.num_rows:
                    continue
                path = self._store.partition(self.spec, start_s)
                if self._store.is_damaged(path):
                    result += WriteResult(left_out=rows.num_rows)
                    continue
                before = state_of(path)
                merged, written = merge(db, self.spec, path, rows)
                if merged is not None:
                    # Once per write is enough: no process reads the stale days before the lock is released.
                    days = set(opens(start_s)) - opened
                    self._store.reopen(days)
                    opened |= days
                    write_partition(path, merged, self.spec)
                changes[start_s] = PartitionChange(before, state_of(path), written.replaced > 0)
                result += written
            if self.spec.name == "telemetry":
                self._store.imported_files().note(changes, self._file_key, self._is_first)
        self._clear()
        return result

    def replace(self, owners: pa.Table) -> int:
        """Replace all rows of the owners by the rows that wait. Returns the number of partition files that changed.

        owners: values of some columns of the key, including the time column. Damaged files stay as they are.
        """
        changed, given = 0, dict(self._parts())
        with self._store.lock(), self._store.connect() as db:
            for start_s, chosen in by_partition(self.spec, owners):
                path = self._store.partition(self.spec, start_s)
                if self._store.is_damaged(path):
                    continue
                replaced = replace(db, self.spec, path, given.get(start_s, self.spec.schema.empty_table()), chosen)
                if replaced is not None:
                    write_partition(path, replaced, self.spec)
                    changed += 1
        self._clear()
        return changed

    def _parts(self) -> Iterator[tuple[int, pa.Table]]:
        """Start (s) of each partition, in time order, and its rows in the order given."""
        for start_s in sorted({*self._on_disk, *self._in_memory}):
            yield start_s, pa.concat_tables([*self._read(start_s), *self._in_memory.get(start_s, [])])

    def _clear(self) -> None:
        self._is_first = False
        self._in_memory, self._on_disk = {}, {}
        self._rows_in_memory = self._rows = 0
        if self._path:
            self._path.unlink(missing_ok=True)

    def _spill(self) -> None:
        """Move the rows in memory to the file, with one Arrow stream for each partition, if a file can be made."""
        if self._path is None:
            if not (folder := self._stack.enter_context(spill_folder([self._store.root]))):
                return
            self._path = Path(folder) / f"staged-{self.spec.name}"
        with writing(self._path), self._path.open("ab") as out:
            for start_s, tables in self._in_memory.items():
                rows, offset = pa.concat_tables(tables).combine_chunks(), out.tell()
                with pa.ipc.new_stream(out, rows.schema) as stream:
                    stream.write_table(rows)
                self._on_disk.setdefault(start_s, []).append((offset, out.tell() - offset))
        self._in_memory, self._rows_in_memory = {}, 0

    def _read(self, start_s: int) -> Iterator[pa.Table]:
        if self._path and start_s in self._on_disk:
            with self._path.open("rb") as file:
                for offset, length in self._on_disk[start_s]:
                    file.seek(offset)
                    yield pa.ipc.open_stream(file.read(length)).read_all()
