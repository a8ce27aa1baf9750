#!/usr/bin/python3 -BIS
"""Stands in for nvidia-cuda-mps-control: installed under that name, first in PATH.

The file mode, beside the program or named by FAKE_MPS_MODE, says how it behaves, in words:

- refuse: -d fails. hang: -d never returns. no-server: no server starts. mute: nothing answers after the start.
- stubborn: terminate_client and quit never return. dies: the daemon ends by itself once a client has started.
- fault: the server's log names a fatal fault, with the process ids in the file faulty beside the mode, if there.

Every call is a line of the file calls beside the mode, with the pipe directory. Clients are this user's processes that
have this pipe directory in their environment and are no control program. terminate_client creates PID.terminated in
the log directory: whoever kills a client without it has left the server undefined.
"""

import os
import signal
import sys
import time

PIPES = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOGS = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
MODE = os.environ.get("FAKE_MPS_MODE") or os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "mode")
PID = f"{PIPES}/nvidia-cuda-mps-control.pid"


def words():
    try:
        with open(MODE) as file:
            return file.read().split()
    except OSError:
        return []


def note(text):
    with open(os.path.join(os.path.dirname(MODE), "calls"), "a") as file:
        file.write(f"{text} {PIPES} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")


def log(name, who, text):
    with open(f"{LOGS}/{name}.log", "a") as file:
        file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}.000 {who} {os.getpid()}] {text}\n")


def environment(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def clients():
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={PIPES}".encode()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        entries = environment(pid)
        if wanted in entries and not any(entry.startswith(b"ALMANAC_PACK_DAEMON=") for entry in entries):
            yield int(pid)


def daemon_pid():
    try:
        with open(PID) as file:
            pid = int(file.read())
        os.kill(pid, 0)
        return pid
    except (OSError, ValueError):
        sys.exit("Cannot find MPS control daemon process")


def start():
    if "refuse" in words():
        sys.exit("An instance of this daemon is already running")
    while "hang" in words():
        time.sleep(1)
    if os.fork():
        while not os.path.exists(PID):
            time.sleep(0.01)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    with open(f"{PID}.new", "w") as file:
        file.write(f"{os.getpid()}\n")
    os.rename(f"{PID}.new", PID)
    log("control", "Control", "Start")
    serve()


def serve():
    has_logged = False
    while True:
        time.sleep(0.05)
        if "fault" in words() and not has_logged:
            has_logged = True
            try:
                with open(os.path.join(os.path.dirname(MODE), "faulty")) as file:
                    pids = file.read().split()
            except OSError:
                pids = []
            log("server", "Server", f"Fatal GPU exception; clients: {' '.join(pids) or 'unknown'}")
        if "dies" in words() and any(True for _ in clients()):
            os._exit(1)


def end(pid):
    for number, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
        try:
            os.kill(pid, number)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                with open(f"/proc/{pid}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "Z":
                        return
                time.sleep(0.02)
        except OSError:
            return


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
        for client in clients():
            print(client)
    elif name == "terminate_client":
        with open(f"{LOGS}/{rest.split()[1]}.terminated", "w"):
            pass
        log("server", "Server", f"terminated client {rest}")
    elif name == "quit":
        end(pid)
        os.remove(PID)


def main():
    if sys.argv[1:] == ["-d"]:
        note("-d")
        start()
        return
    for line in sys.stdin:
        note(line.strip())
        obey(line.strip())


if __name__ == "__main__":
    main()
