"""Read files that were published for one user, or for everybody. Needs the standard library only.

    <root>/user/<uid>/<kind>     of root, readable by that user. root: hooks.advice_dir
    <root>/user/_site/<kind>     for everybody

A file is one JSON object: `almanac` names its kind, `format` is its version, and the other members are fields of the
kind's type. A subject declares its kind once, and writer and reader use it:

    TIMES = PublishedKind("times", TimesFile)
    outgoing.write([(uid, TIMES.name, TIMES.render(times))])     the publisher (almanac.published.outgoing)
    TIMES.read(root, uid, os.getuid()).value                     the reader, which raises
    usable(TIMES, root, uid, now_s)                              the reader, None without a file in force

A type is a frozen dataclass whose annotations exist at run time: bool, int, float, str, Literal, X | None, Any,
tuple[X, ...], tuple[X, Y], list[X], Mapping[str, X], TypedDicts, NamedTuples, and such dataclasses.
Fields that are empty, and empty by default, are left out.

Programs one release apart read each other's files. A reader ignores members that it does not know and names them
(`PublishedFile.unknown`), and takes the defaults of members that are not there. So give a new field a default. Raise
`version` only if older readers would misunderstand the file: they refuse a larger one.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from almanac.errors import FileFormatError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

TEXT_BYTES, PACKED_BYTES, UNPACKED_BYTES = 65_536, 16 << 20, 64 << 20
"""Largest size of a file as text, of a packed file, and of its content."""
REPORTS = "reports"
"""The folder of a user's reports."""
CLOCK_TOLERANCE_S = 300
"""A file that was written later than this is not used. MUNGE, and so Slurm, works with clocks that differ by less."""
_MOST = 2**63
_OPERATOR = "tell an operator of almanac"
_SPARE_BYTES = 512
"""Of a file's size, left for all but the parts that `fitting` counts."""
T = TypeVar("T")
P = TypeVar("P")
_Convert = Callable[[Any, set[str]], Any]
"""Turns a JSON value into one of a type, and adds the names of unknown members to the set. Raises ValueError."""


class Expiring(Protocol):
    """A value that is used for some time only, s since 1970."""

    @property
    def written_s(self) -> int: ...

    @property
    def expires_s(self) -> int: ...


def is_of_future(value: Expiring, now_s: int) -> bool:
    """Return True if a clock was ahead when the value was written: it would be believed for as long."""
    return value.written_s > now_s + CLOCK_TOLERANCE_S


def user_folder(root: Path | str, name: str) -> Path:
    """Return the folder of a user's files. name: uid, or `_site` for everybody else."""
    from pathlib import Path  # late: a submission does without it

    return Path(root) / "user" / name


@dataclass(frozen=True, eq=False, repr=False)
class PublishedFile(Generic[T]):
    """The value of a file. unknown: names of members that this release does not know."""

    value: T
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class PublishedKind(Generic[T]):
    """A kind of file. name: of the file. text_bytes: its largest size as text. is_packed: gzip instead.

    is_plain: all texts are printable ASCII, for a terminal.
    """

    name: str
    type: type[T]
    version: int = 1
    is_packed: bool = False
    is_plain: bool = True
    text_bytes: int = TEXT_BYTES

    @property
    def most_bytes(self) -> int:
        return PACKED_BYTES if self.is_packed else self.text_bytes

    def fitting(self, parts: Iterable[P]) -> tuple[P, ...]:
        """Return as many of the first parts of a value as fit into a file, without those that no reader takes."""
        kept, room = list[P](), self.most_bytes - _SPARE_BYTES
        for part in parts:
            plain = to_plain(part)
            try:
                _of_type(cast(Any, type(part)), self.is_plain)(plain, set())
            except ValueError:
                continue
            room -= len(_json(plain)) + 1
            if room < 0:
                break
            kept.append(part)
        return tuple(kept)

    def render(self, value: T) -> bytes:
        """Return the file's bytes. Raises ValueError if no reader would take them, such as for NaN."""
        content = _json({"almanac": self.name, "format": self.version, **_members(value)}) + b"\n"
        if len(content) > (UNPACKED_BYTES if self.is_packed else self.text_bytes):
            raise ValueError(f"{len(content)} bytes are too many for a file of this kind")
        if self.is_packed:
            import gzip

            content = gzip.compress(content, 6, mtime=0)
            if len(content) > PACKED_BYTES:
                raise ValueError(f"{len(content)} bytes are too many for a packed file")
        try:
            self.parse(content)
        except FileFormatError as error:
            raise ValueError(str(error)) from error
        return content

    def parse(self, content: bytes) -> PublishedFile[T]:
        """Return the value. Raises FileFormatError, also for a file of another kind or a newer version."""
        unknown = set[str]()
        try:
            document = json.loads(_unpacked(content) if self.is_packed else content, parse_constant=_refuse)
            if not isinstance(document, dict) or document.pop("almanac", None) != self.name:
                raise ValueError(f"not a file of the kind {self.name}")
            version = document.pop("format", None)
            if version.__class__ is int and version <= self.version:
                value: T = _of_type(cast(Any, self.type), self.is_plain)(document, unknown)
                return PublishedFile(value, tuple(sorted(unknown)))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            hint = "ask an operator to update almanac's host or remove it; then `almanac publish` writes it again"
            raise FileFormatError(f"damaged, or of an older release: {error!s:.200}", hint) from error
        raise FileFormatError(
            f"format {version!r:.40}, expected at most {self.version}", "use the almanac release that publishes here"
        )

    def read(self, root: Path | str, user: str, uid: int, name: str = "") -> PublishedFile[T]:
        """Return what was published. user: uid, or `_site`. uid: of the reader. name: if not that of the kind.

        Raises FileNotFoundError; StoreError if it cannot be read; FileFormatError if it is damaged, or not trusted.
        """
        path = f"{root}/user/{user}/{name or self.name}"
        try:
            return self.parse(read_own(path, uid, self.most_bytes))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}", _OPERATOR) from error
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}", error.hint) from error


def in_force(kind: PublishedKind[T], root: Path | str, user: str, now_s: int) -> PublishedFile[T] | None:
    """Return a file of an Expiring kind; None if it is absent, unreadable, malformed, expired, or of the future."""
    try:
        file = kind.read(root, user, os.getuid())
    except (FileFormatError, StoreError, OSError):
        return None
    value: Any = file.value
    return None if now_s >= value.expires_s or is_of_future(value, now_s) else file


def usable(kind: PublishedKind[T], root: Path | str, user: str, now_s: int) -> T | None:
    """Return the value of `in_force`."""
    file = in_force(kind, root, user, now_s)
    return file.value if file else None


def read_own(path: Path | str, uid: int, most_bytes: int) -> bytes:
    """Return the content of a file that was published for a user. Never waits, and follows no link.

    Raises OSError, and FileFormatError if anybody but that user and root can write to it, or if it is larger.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise FileFormatError("not a regular file", _OPERATOR)
        if found.st_uid not in (0, uid) or found.st_mode & 0o022:
            raise FileFormatError("other users can write to it", _OPERATOR)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FileFormatError(f"larger than {most_bytes} bytes", _OPERATOR)
    return content


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_members, allow_nan=False, separators=(",", ":")).encode("ascii")


def _unpacked(content: bytes) -> bytes:
    import zlib

    stream = zlib.decompressobj(wbits=31)
    try:
        whole = stream.decompress(content, UNPACKED_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof or stream.unused_data or len(whole) > UNPACKED_BYTES:  # zlib compares the checksum at the end
        raise ValueError("cut off, or too large")
    return whole


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def to_plain(value: Any) -> Any:
    """Return what JSON can hold: dataclasses as objects without fields that are empty, and empty by default."""
    return json.loads(json.dumps(value, default=_members))


def _members(value: Any) -> dict[str, Any]:
    """Return one level of a dataclass or mapping for json, whose own loop is the fast one."""
    if is_dataclass(value):
        named = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: each for field, each in named if each or each != field.default}
    return {str(name): each for name, each in value.items()}


@cache
def _of_type(hint: Any, is_plain: bool) -> _Convert:
    """Return what converts values of an annotated type, made once for each."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return lambda value, _: value
    if kind is float:
        return _number
    if kind is Literal or kind in (bool, int, str, NoneType):
        return _scalar(hint, kind, inner, is_plain)
    if kind in (Union, UnionType):
        (other,) = (_of_type(each, is_plain) for each in inner if each is not NoneType)
        if other is _number:
            return _number_or_none
        return lambda value, unknown: None if value is None else other(value, unknown)
    if is_dataclass(kind):
        return _record(hint, is_plain)
    if hasattr(kind, "_fields"):
        return _sequence(tuple(get_type_hints(kind).values()), is_plain, lambda values: kind(*values))
    if kind is tuple:
        return _sequence(inner, is_plain, tuple)
    if kind is list:
        return _sequence((*inner, ...), is_plain, list)
    if is_typeddict(kind):
        return _row(kind, is_plain)
    if issubclass(kind, Mapping):
        return _table(_of_type(str, is_plain), _of_type(inner[1], is_plain))
    raise TypeError(f"{hint} has no form in a published file")


def _number(value: Any, _: set[str]) -> float:
    if value.__class__ in (int, float) and -_MOST < value < _MOST:
        return float(value)
    raise ValueError(f"{value!r:.60} is not a number in range")


def _number_or_none(value: Any, unknown: set[str]) -> float | None:
    """Convert a sample of a series. A report has 100,000 of them, so most take one call."""
    if value is None or (value.__class__ is float and -_MOST < value < _MOST):
        return value
    return _number(value, unknown)


def _scalar(hint: Any, kind: Any, choices: tuple[Any, ...], is_plain: bool) -> _Convert:
    def convert(value: Any, _: set[str]) -> Any:
        is_of_kind = value in choices if choices else value.__class__ is kind
        if not is_of_kind or (kind is int and not -_MOST < value < _MOST):
            raise ValueError(f"{value!r:.60} is not {hint}")
        if is_plain and kind is str and not (value.isascii() and value.isprintable()):
            raise ValueError(f"{value!r:.60} is not printable ASCII")
        return value

    return convert


def _record(kind: Any, is_plain: bool) -> _Convert:
    hints = get_type_hints(kind)
    known = {field.name: _of_type(hints[field.name], is_plain) for field in fields(kind) if field.init}

    def convert(value: Any, unknown: set[str]) -> Any:
        if value.__class__ is not dict:
            raise ValueError(f"{value!r:.60} is not an object")
        if not value.keys() <= known.keys():
            unknown.update(value.keys() - known.keys())
        return kind(**{name: known[name](each, unknown) for name, each in value.items() if name in known})

    return convert


def _row(kind: Any, is_plain: bool) -> _Convert:
    """Of a TypedDict: a table's row. Columns that are not there are None; those that are not known are kept."""
    known = {name: _of_type(hint, is_plain) for name, hint in get_type_hints(kind).items()}
    absent = {name: None for name in known if name in kind.__required_keys__}

    def convert(value: Any, unknown: set[str]) -> Any:
        if value.__class__ is not dict:
            raise ValueError(f"{value!r:.60} is not an object")
        converted = {name: known[name](each, unknown) for name, each in value.items() if name in known}
        return {**absent, **value, **converted}

    return convert


def _table(names: _Convert, values: _Convert) -> _Convert:
    def convert(value: Any, unknown: set[str]) -> Any:
        if value.__class__ is not dict:
            raise ValueError(f"{value!r:.60} is not an object")
        return {names(name, unknown): values(each, unknown) for name, each in value.items()}

    return convert


def _sequence(inner: tuple[Any, ...], is_plain: bool, make: Callable[[Any], Any]) -> _Convert:
    """Of a tuple of any length, tuple[X, ...], or of a fixed one."""
    is_any_length = len(inner) == 2 and inner[1] is ...
    converters = [_of_type(each, is_plain) for each in inner if each is not ...]

    def convert(value: Any, unknown: set[str]) -> Any:
        if value.__class__ is not list or not (is_any_length or len(value) == len(converters)):
            raise ValueError(f"{value!r:.60} is not a list of the right length")
        if is_any_length:
            only = converters[0]
            return make([only(each, unknown) for each in value])
        return make(each(one, unknown) for each, one in zip(converters, value, strict=True))

    return convert
