"""Mails through the sendmail programs of real mail servers: Postfix and msmtp, each in a mount namespace of its own.

The packages are installed over copies of /usr, /etc, and /var that only the namespace sees.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = """
set -e
mount -t tmpfs none "$FOLDER"
for top in usr etc var; do
    mkdir "$FOLDER/$top" "$FOLDER/$top.work"
    mount -t overlay overlay -o "lowerdir=/$top,upperdir=$FOLDER/$top,workdir=$FOLDER/$top.work" "/$top"
done
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$PACKAGE" >&2
rm -f /etc/msmtprc
"""
APT_FAILED = 100
POSTFIX = (
    "inet_interfaces=loopback-only", "inet_protocols=ipv4", "mydestination=", "master_service_disable=inet",
    "minimal_backoff_time=1s", "maximal_backoff_time=2s", "queue_run_delay=1s", "smtp_tls_security_level=none",
)  # fmt: skip


def walked(package: str, folder: Path) -> dict[str, Any]:
    """Answers of the package's program to each mail, and the mails that arrived."""
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip("needs root, and Debian's apt-get")
    env = os.environ | {"FOLDER": str(folder), "PACKAGE": package}
    argv = ["unshare", "-m", "sh", "-c", f'{INSTALL}\nexec "$0" "$@"', sys.executable, __file__, package]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode == APT_FAILED:
        pytest.skip(f"{package} cannot be installed here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_postfix_keeps_what_it_takes_and_needs_rights_that_the_unit_forbids(tmp_path: Path) -> None:
    found = walked("postfix", tmp_path)
    assert {found[each] for each in ("before start", "up", "gone", "greylisted", "relay down")} == {"taken"}
    assert found["arrived"] == ["ann before start", "ann up", "almanac bounce", "eve greylisted"], found["queue"]
    assert found["unprivileged"] == "taken"
    assert found["no new privileges"] == "ServerError: /usr/sbin/sendmail takes no mail: timed out after 3 s"


def test_msmtp_hands_the_answers_of_its_server_on(tmp_path: Path) -> None:
    found = walked("msmtp", tmp_path)
    assert found["up"] == found["no new privileges"] == "taken"
    assert "exit code 65: " in found["gone"] and "550 5.1.1 no such user" in found["gone"]
    assert "exit code 69: " in found["greylisted"] and "450 4.7.1 greylisted" in found["greylisted"]
    assert "exit code 75: " in found["relay down"] and "Connection refused" in found["relay down"]


def _walk(package: str) -> dict[str, Any]:
    from mail_server import MailServer  # type: ignore[import-not-found]

    found: dict[str, Any] = {}
    if package == "postfix":
        found["before start"] = _handed("before start", "ann")
    with MailServer() as server:
        if package == "postfix":
            subprocess.run(["postconf", "-e", f"relayhost=[127.0.0.1]:{server.port}", *POSTFIX], check=True)
            subprocess.run(["postfix", "start"], check=True, capture_output=True)
        else:
            Path("/etc/msmtprc").write_text(f"account default\nhost 127.0.0.1\nport {server.port}\n")
        arrived = [0]

        def wait(more: int) -> None:
            arrived[0] += more
            end_s = time.monotonic() + 120
            while package == "postfix" and len(server.taken) < arrived[0] and time.monotonic() < end_s:
                time.sleep(0.1)

        wait(1)
        found["up"] = _handed("up", "ann")
        wait(1)
        server.says_rcpt = lambda address: "550 5.1.1 no such user" if address.startswith("gone") else None
        found["gone"] = _handed("gone", "gone")
        wait(1)
        server.says_rcpt = lambda address: "450 4.7.1 greylisted"
        found["greylisted"] = _handed("greylisted", "eve")
        time.sleep(1)
        server.says_rcpt = lambda address: None
        wait(1)
        found["queue"] = subprocess.run(["sh", "-c", "postqueue -p 2>&1"], capture_output=True, text=True).stdout
        found["arrived"] = [
            f"{to.partition('@')[0]} {'bounce' if 'Undelivered' in mail['Subject'] else mail['Subject']}"
            for _, recipients, mail in server.taken
            for to in recipients
        ]
        for name, *more in (("unprivileged",), ("no new privileges", "--no-new-privs")):
            become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *more]
            argv = [*become, sys.executable, __file__, package, name]
            found[name] = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    found["relay down"] = _handed("relay down", "ann")
    if package == "postfix":
        subprocess.run(["postfix", "stop"], check=True, capture_output=True)
    return found


def _handed(subject: str, user: str) -> str:
    from almanac.config import Mail
    from almanac.errors import ServerError
    from reports.mail import handover
    from reports.mail.record import Message

    if sys.argv[1:] == ["postfix", "no new privileges"]:
        handover.TIMEOUT_S = 3
    to = f"{user}@example.org"
    raw = f"From: almanac@example.org\r\nTo: {to}\r\nSubject: {subject}\r\n\r\nHello\r\n".encode()
    program = "/usr/sbin/sendmail" if sys.argv[1] == "postfix" else "/usr/bin/msmtp"
    with handover.MailAgent(Mail(server=program, sender="almanac@example.org")) as agent:
        try:
            agent.hand_over(Message(f"<{user}@test>", user, to, "job", raw))
        except ServerError as error:
            return f"{type(error).__name__}: {error}"
    return "taken"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/reports/mail")]
    if sys.argv[2:]:
        print(_handed(sys.argv[2], "ann"))
    else:
        print(json.dumps(_walk(sys.argv[1])))
