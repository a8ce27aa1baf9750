"""A submission as a Request, and a hash of what it runs.

The request is a script's #SBATCH lines, the environment and the command line, as sbatch merges them.

The script key stands for a batch job's script, its work directory, and what its arguments are called. A sweep has a
name, a value, or a directory of its own for each job. So paths and arguments are masked as job names are
(almanac.names), and an option's value does not count: "run.sh --lr=0.1" and "run.sh --lr=0.2" have one key. Slurm joins
the words of a command by blanks, and the record of a job has no more. A live request goes the same way, so that both
get one key whatever the words hold. The user is part of the hash: equal keys of two users mean nothing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from almanac.errors import RequestError
from almanac.names import framework_of, is_family, mask, name_key, rule_key
from almanac.records import JobRequest
from almanac.tres import Gpus, parse_gpus
from almanac.units import parse_time_limit
from slurm.options import Option, environment_options, is_het_script, parse_options, parse_script

_COUNT = re.compile(r"[0-9]{1,9}")
_NODES = re.compile(r"([0-9]{1,9})([kKmM]?)(?:[-,:].*)?")
_GPU_TERM = re.compile(r"(?:gres[:/])?gpu(?:[:/=].*)?")
_GPU_NUMBER = re.compile(r"(?:gpu:)?(?:[^:,]+:)?[0-9]{1,9}")
_EXACT_NODES = re.compile(r"([0-9]{1,9})(?:-\1)?")
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
"""Options but --gres that name GPUs."""
_GPU_NONE = re.compile(r".*[:=]0+")

MAX_BYTES = 1024
"""Most bytes of a job's name, constraint, GRES ...: slurmctld refuses longer ones."""
MAX_LIST_BYTES = 65_536
"""Most bytes of a list of nodes."""

KEY_LETTERS = 16
LONGEST_LINE = 8192
"""Characters of a submit line that gets a key: reading one of 64 kB takes 29 ms, and a user may submit thousands."""
_PROGRAM = "sbatch"
_SPOOLED = "slurm_script"
"""slurmd's own copy of a script, which a job submits again as $0: it may be any."""
_PASSING = ("/dev/", "/proc/")
"""A shell's <(...) and the like."""

Options = Mapping[str, Option]


@dataclass(frozen=True)
class SbatchRequest:
    """A submission as typed. Of a het job, only the first component's options count. options: merged as sbatch merges
    them; rest: the script and its arguments, as typed; line: all words, joined by blanks as Slurm does.
    """

    options: Options
    rest: tuple[str, ...]
    script: str | None
    is_het: bool
    line: str = "sbatch"

    def request(self, user: str, submit_s: int, work_dir: str = "") -> JobRequest:
        """Return the request. work_dir: the folder of the submission; "" if unknown, and then no script is known.
        Raises RequestError.
        """
        is_wrapped = "wrap" in self.options
        script = self.script or ""
        default = "wrap" if is_wrapped else "sbatch" if script == "-" else script.rpartition("/")[2]
        request = to_request(self.options, user, submit_s, default)
        chdir = self.options.get("chdir")
        folder = posixpath.join(work_dir, chdir.value or "") if chdir and work_dir else work_dir
        key = "" if self.is_het else command_key(user, self.line, folder)
        return replace(request, script_key=key, may_use_more=request.may_use_more or self.is_het)


def parse_submission(
    argv: Sequence[str], environ: Mapping[str, str], read_script: Callable[[str], str]
) -> SbatchRequest:
    """The options of what would follow `sbatch`. Of a het job, the first component's.

    read_script returns the text of a script by its name; "-" is standard input. Raises RequestError, and what
    read_script raises.
    """
    typed, rest = parse_options(argv)
    is_het = rest[:1] == [":"]
    while rest[:1] == [":"]:
        _, rest = parse_options(rest[1:])
    wrapped = any(option.name == "wrap" for option in typed)
    script = rest[0] if rest and not wrapped else None
    text = read_script(script) if script is not None else ""
    options = merge(parse_script(text), environment_options(environ), typed)
    return SbatchRequest(options, tuple(rest), script, is_het or is_het_script(text), " ".join(["sbatch", *argv]))


def merge(*sources: Iterable[Option]) -> dict[str, Option]:
    """Options by name; a later source, and a later option of one source, wins. sbatch's order is script,
    environment, command line.
    """
    return {option.name: option for source in sources for option in source}


def to_request(options: Options, user: str, submit_s: int, default_name: str = "") -> JobRequest:
    """Return the request of the merged options. Counts are of the whole job, or of one array task.

    Raises RequestError if a known option cannot be read: sbatch refuses such a submission, too.
    """
    nodes, tasks = _nodes(options), _number(options, "ntasks")
    nodes = nodes or _derived_nodes(options, tasks)
    tasks = tasks or _derived_tasks(options, nodes)
    gpus, comment = _gpus(options, nodes, tasks), options.get("comment")
    return JobRequest(
        user=user,
        # slurmdbd stores a double quote as a backtick, and so the history has it.
        job_name=_text(options, "job-name", default_name).replace('"', "`"),
        account=_text(options, "account"),
        partition=_text(options, "partition"),
        qos=_text(options, "qos"),
        constraints=_text(options, "constraint"),
        gres=_text(options, "gres"),
        gpu_count=gpus.count,
        gpu_type=gpus.type,
        node_count=nodes,
        cpu_count=_cpus(options, tasks, gpus),
        time_limit_s=_time_limit(options),
        is_array="array" in options,
        submit_s=submit_s,
        gpu_options=tuple((f"--{name}", text) for name in _GPU_OPTIONS if (text := _gpu_text(options, name))),
        may_use_more=_may_use_more(options),
        rule=rule_key(comment.value.replace('"', "`")) if comment and comment.value else "",
    )


def _gpu_text(options: Options, name: str) -> str:
    """Return the option's text if it names GPUs; else ""."""
    return _text(options, name) if name != "tres-per-task" or _listed(options, name).count else ""


def _may_use_more(options: Options) -> bool:
    """Return True if the job may get more GPUs than the request counts, or whole nodes. Slurm may spread tasks over
    nodes.
    """
    if "exclusive" in options and options["exclusive"].value not in ("user", "mcs"):
        return True
    if _text(options, "nodes"):
        return not _EXACT_NODES.fullmatch(_text(options, "nodes"))
    return (_number(options, "ntasks") or 1) > 1 and not _text(options, "gpus")


def _text(options: Options, name: str, default: str = "", most: int = MAX_BYTES) -> str:
    option = options.get(name)
    if option is None or option.value is None:
        return default
    size = len(option.value.encode("utf-8", "surrogatepass"))
    if size > most:
        raise RequestError(f"{option.spelling} has {size} bytes, Slurm accepts at most {most}", "shorten it")
    return option.value


def _number(options: Options, name: str) -> int | None:
    """A count of at least 0; None where the option is not given."""
    option = options.get(name)
    if option is None or option.value is None:
        return None
    if not _COUNT.fullmatch(option.value):
        raise _unreadable(option, "a whole number")
    return int(option.value)


def _unreadable(option: Option, expected: str) -> RequestError:
    return RequestError(f"{option.spelling} is {option.value!r:.100}, expected {expected}", "correct the option")


def _nodes(options: Options) -> int | None:
    """The least number of nodes that --nodes ("2", "2-4", "1k") or --nodelist names; None where neither does."""
    option = options.get("nodes")
    if option is None or option.value is None:
        return _listed_nodes(options)
    match = _NODES.fullmatch(option.value)
    if not match:
        raise _unreadable(option, "a number of nodes, or MIN-MAX")
    return max(1, int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()])


def _listed_nodes(options: Options) -> int | None:
    listed = _text(options, "nodelist", most=MAX_LIST_BYTES)
    if not listed or "/" in listed:
        return None  # a file's name
    from slurm.hostlist import count  # late: ClusterShell takes a while, and sbatch-almanac seldom needs it

    try:
        return count(listed)
    except ValueError as error:
        raise _unreadable(options["nodelist"], "a host list such as n[1-3]") from error


def _derived_nodes(options: Options, tasks: int | None) -> int:
    """Nodes that the other counts need at least, as slurmctld works them out; 1 where nothing says more."""
    per_node = _number(options, "ntasks-per-node")
    gpus, gpus_per_node = _typed(options, "gpus"), _typed(options, "gpus-per-node")
    by_tasks = -(-tasks // per_node) if tasks and per_node else 1
    by_gpus = -(-gpus.count // gpus_per_node.count) if gpus.count and gpus_per_node.count else 1
    return max(by_tasks, by_gpus)


def _derived_tasks(options: Options, nodes: int) -> int:
    """Tasks where --ntasks is not given: per node, per GPU, or as many as GPUs and GPUs per task make; else one
    per node.
    """
    per_node, per_gpu = _number(options, "ntasks-per-node"), _number(options, "ntasks-per-gpu")
    gpus, per_task = _typed(options, "gpus"), _per_task(options)
    if per_node:
        return nodes * per_node
    if per_gpu and gpus.count:
        return per_gpu * gpus.count
    if gpus.count and per_task.count:
        return max(1, gpus.count // per_task.count)
    return nodes


def _gpus(options: Options, nodes: int, tasks: int) -> Gpus:
    """GPUs of the whole job, from whichever option asks for them; --gpus is the total wherever it is given."""
    sockets = _number(options, "sockets-per-node") or 1
    ways = (
        (_typed(options, "gpus"), 1),
        (_typed(options, "gpus-per-node"), nodes),
        (_per_task(options), tasks),
        (_listed(options, "gres"), nodes),
        (_typed(options, "gpus-per-socket"), sockets * nodes),
    )
    kind = next((gpus.type for gpus, _ in ways if gpus.type), "")
    total = next((gpus.count * times for gpus, times in ways if gpus.count), 0)
    return Gpus(total, kind if total else "")


def _per_task(options: Options) -> Gpus:
    """--gpus-per-task, or the GPUs of --tres-per-task (from 24.05)."""
    return _typed(options, "gpus-per-task") if "gpus-per-task" in options else _listed(options, "tres-per-task")


def _typed(options: Options, name: str) -> Gpus:
    """ "2", "a100:2" or "a100:2,v100:1" as the options that name GPUs only take it."""
    value = _text(options, name)
    if value and not all(_GPU_NUMBER.fullmatch(term) for term in value.split(",")):
        raise _unreadable(options[name], "a number of GPUs, or TYPE:NUMBER")
    return _terms(options[name], [f"gpu:{term.removeprefix('gpu:')}" for term in value.split(",")]) if value else Gpus()


def _listed(options: Options, name: str) -> Gpus:
    """The GPUs among the terms of --gres or --tres-per-task, such as "gpu:a100:2,nvme:1"."""
    terms = [term for term in _text(options, name).split(",") if _GPU_TERM.fullmatch(term)]
    return _terms(options[name], terms) if terms else Gpus()


def _terms(option: Option, terms: Sequence[str]) -> Gpus:
    if any(parse_gpus(term).count == 0 and not _GPU_NONE.fullmatch(term) for term in terms):
        raise _unreadable(option, "a number of GPUs, or TYPE:NUMBER")
    return parse_gpus(",".join(terms))


def _cpus(options: Options, tasks: int, gpus: Gpus) -> int:
    """As ReqCPUS counts them, which leaves --mincpus out."""
    per_gpu = _number(options, "cpus-per-gpu")
    return per_gpu * gpus.count if per_gpu and gpus.count else tasks * (_number(options, "cpus-per-task") or 1)


def _time_limit(options: Options) -> int | None:
    """Return seconds; None if no limit is asked for: not given, "UNLIMITED", or 0."""
    option = options.get("time")
    if option is None or option.value is None:
        return None
    try:
        return parse_time_limit(option.value) or None
    except ValueError as error:
        raise _unreadable(option, "minutes, MM:SS, HH:MM:SS or D-HH:MM:SS") from error


def script_key(user: str, submit_line: str, work_dir: str) -> str:
    """Return 16 hex digits; "" for a submission without a known script: standard input, --wrap, srun, salloc, het jobs,
    a line that sbatch would refuse, a line longer than LONGEST_LINE, and an unknown work directory. A relative path is
    resolved by the work directory, as sbatch does; no file is looked at.
    """
    if len(submit_line) > LONGEST_LINE:
        return ""
    words = submit_line.replace('"', "`").split()  # slurmdbd stores a backtick for a double quote
    if not work_dir.startswith("/") or not words or words[0].rpartition("/")[2] != _PROGRAM or ":" in words:
        return ""
    try:
        typed, command = parse_options(words[1:])
    except RequestError:
        return ""
    # A blank within a value before it, as in a job's name, hides --wrap behind what looks like a script.
    is_wrapped = any(word.partition("=")[0] == "--wrap" for word in words)
    if is_wrapped or any(option.name == "wrap" for option in typed) or command[:1] in ([], ["-"]):
        return ""
    folder = posixpath.normpath(work_dir)
    path = posixpath.normpath(posixpath.join(folder, command[0]))
    if path.startswith(_PASSING) or posixpath.basename(path) == _SPOOLED:
        return ""
    return _hash(user, _mask(path), _mask(folder), *sorted({*map(_mask, _arguments(command[1:]))}))


def command_key(user: str, submit_line: str, work_dir: str) -> str:
    """The script key; of a --wrap, 16 hex digits that stand for its work directory and all words of its command.

    "" if no word of that command identifies work as the words of a job name do: `--wrap bash` may be anything.
    """
    words = submit_line[: LONGEST_LINE + 1].replace('"', "`").split()
    at = next((number for number, word in enumerate(words) if word.partition("=")[0] == "--wrap"), None)
    if at is None or words[0].rpartition("/")[2] != _PROGRAM:
        return script_key(user, submit_line, work_dir)
    command = list(filter(None, [words[at].partition("=")[2], *words[at + 1 :]]))
    if len(submit_line) > LONGEST_LINE or not work_dir.startswith("/") or ":" in words[:at]:
        return ""
    is_known = any(is_family(name_key(word)) for word in command)
    return _hash(user, "--wrap", _mask(posixpath.normpath(work_dir)), *map(_mask, command)) if is_known else ""


def command_framework(submit_line: str) -> str:
    """The framework that the command of a submission shows, by the names of its files and its arguments; else "".

    Nothing else of the line is kept. Slurm's own options and folders do not count: an account may be called torch.
    """
    words = submit_line[:LONGEST_LINE].replace('"', "`").split()
    at = next((number for number, word in enumerate(words) if word.partition("=")[0] == "--wrap"), None)
    try:
        command = parse_options(words[1:])[1] if at is None else [words[at].partition("=")[2], *words[at + 1 :]]
    except RequestError:
        return ""
    if ":" in words:  # of a het job, and which words are this component's is not sure
        return ""
    return framework_of(" ".join(word.rstrip("/").rpartition("/")[2] for word in command)) or ""


def _hash(*parts: str) -> str:
    import hashlib  # late: sbatch-almanac needs none

    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:KEY_LETTERS]


def _arguments(words: Sequence[str]) -> Iterator[str]:
    """Names of options, and what is no option's value: whether "--fast" takes the next word is not known."""
    is_value = False
    for word in words:
        is_option = word.startswith("-")
        if is_option or not is_value:
            yield word.partition("=")[0]
        is_value = is_option and "=" not in word


def _mask(text: str) -> str:
    return mask(text.encode("utf-8", "replace"))
