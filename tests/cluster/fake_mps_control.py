#!/usr/bin/python3 -BIS
"""Stands in for nvidia-cuda-mps-control: installed under that name, first in PATH.

The file mode in the program's folder, or the one that FAKE_MPS_MODE names, says in words how it behaves:

- refuse: -d fails. hang: -d never returns. no-server: no server starts. mute: nothing answers after the start.
- stubborn: terminate_client and quit never return. dies: the daemon ends by itself once it has a client.
- fault: the server logs a fatal fault, once, with the words of the file faulty in the same folder, if there is one.

Every call is a line of the file calls in that folder: command, pipe directory, CUDA_VISIBLE_DEVICES. A client is a
process of this user that has the pipe directory in its environment and is no control program. terminate_client leaves a
file PID.terminated in the folder of the mode.
"""

import os
import signal
import sys
import time
from pathlib import Path

PIPES = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
LOGS = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))
MODE = Path(os.environ.get("FAKE_MPS_MODE") or Path(sys.argv[0]).resolve().parent / "mode")
PID = PIPES / "nvidia-cuda-mps-control.pid"


def text_of(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def words():
    return text_of(MODE).split()


def add(path, line):
    with path.open("a") as file:
        file.write(f"{line}\n")


def log(name, text):
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    add(LOGS / f"{name}.log", f"[{stamp}.000 {name.title()} {os.getpid()}] {text}")


def clients():
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={PIPES}".encode()
    for process in Path("/proc").iterdir():
        try:
            entries = (process / "environ").read_bytes().split(b"\0") if process.name.isdecimal() else []
        except OSError:
            continue
        if wanted in entries and not any(entry.startswith(b"ALMANAC_PACK_DAEMON=") for entry in entries):
            yield int(process.name)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def daemon_pid():
    text = text_of(PID).strip()
    if not text or not is_running(text):
        sys.exit("Cannot find MPS control daemon process")
    return int(text)


def start():
    if "refuse" in words():
        sys.exit("An instance of this daemon is already running")
    while "hang" in words():
        time.sleep(1)
    if os.fork():
        while not PID.exists():
            time.sleep(0.01)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    log("control", "Start")
    new = PID.with_suffix(".new")
    new.write_text(f"{os.getpid()}\n")
    new.rename(PID)
    serve()


def serve():
    has_logged = False
    while True:
        time.sleep(0.05)
        if "fault" in words() and not has_logged:
            has_logged = True
            log("server", f"Fatal GPU exception, clients: {text_of(MODE.with_name('faulty')).strip() or 'unknown'}")
        if "dies" in words() and any(True for _ in clients()):
            os._exit(1)


def end(pid):
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + 2
        while is_running(pid) and time.monotonic() < until:
            os.kill(pid, number)
            time.sleep(0.02)


def obey(line):
    name, _, rest = line.partition(" ")
    pid = daemon_pid()
    while "mute" in words() and name != "start_server":
        time.sleep(1)
    while "stubborn" in words() and name in ("terminate_client", "quit"):
        time.sleep(1)
    if name == "get_server_list" and "no-server" not in words():
        print(pid)  # one process is both
    elif name == "get_client_list":
        print(*clients(), sep="\n")
    elif name == "terminate_client":
        if not is_running(rest.split()[1]):
            sys.exit("Client not found")
        MODE.with_name(f"{rest.split()[1]}.terminated").touch()
    elif name == "quit":
        end(pid)


def main():
    commands = ["-d"] if sys.argv[1:] == ["-d"] else sys.stdin.read().splitlines()
    for command in commands:
        add(MODE.with_name("calls"), f"{command}\t{PIPES}\t{os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        start() if command == "-d" else obey(command)


if __name__ == "__main__":
    main()
