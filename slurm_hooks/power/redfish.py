"""A node's power through Redfish (DMTF DSP0266): ComputerSystem.Reset over HTTPS with basic authentication.

The certificate is always verified. No redirect is followed and no proxy is used: the password goes to the BMC only.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
from typing import Any, Literal

from almanac.bounded import watch, within
from slurm_hooks.power.bmc_file import Bmc

_ROOT = "/redfish/v1/"
_MAX_ANSWER = 1 << 20
_BUSY = (408, 409, 429)
_RESETS = {"on": ("On",), "off": ("ForceOff",), "soft": ("GracefulShutdown",)}


class BmcError(Exception):
    """What a BMC said, or did not say. is_final: another try would fail in the same way."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class _Connection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        watch(self.sock)


class Redfish:
    """One node's ComputerSystem. timeout_s is for each request."""

    can_soften = True

    def __init__(self, bmc: Bmc, node: str, timeout_s: float) -> None:
        self._where = bmc.text(bmc.address, node)
        self._system = bmc.text(bmc.system, node)
        self._user, self._ca_file, self._timeout_s = bmc.user, bmc.ca_file, timeout_s
        login = base64.b64encode(f"{bmc.user}:{bmc.password}".encode()).decode()
        self._headers = {"Accept": "application/json", "OData-Version": "4.0", "Authorization": f"Basic {login}"}
        self._path = ""

    def status(self) -> str | None:
        power = str(self._get(self._system_path()).get("PowerState"))
        # PoweringOn and PoweringOff are on their way: the next look says more.
        known = {"On": "on", "Off": "off", "PoweringOn": "on", "PoweringOff": "on"}
        if power not in known:
            raise BmcError(f"{self._where}: PowerState is {power[:40]!r}, expected On or Off")
        return known[power]

    def set(self, wanted: Literal["on", "off", "soft"]) -> None:
        path = self._system_path()
        reset = _dict(_dict(self._get(path).get("Actions")).get("#ComputerSystem.Reset"))
        allowed = reset.get("ResetType@Redfish.AllowableValues")
        kinds = [kind for kind in _RESETS[wanted] if not isinstance(allowed, list) or kind in allowed]
        if not kinds:
            raise BmcError(f"{self._where}: the BMC has no reset {_RESETS[wanted][0]}", is_final=True)
        target = self._inside(reset.get("target", f"{path}/Actions/ComputerSystem.Reset"))
        self._request("POST", target, json.dumps({"ResetType": kinds[0]}).encode())

    def _system_path(self) -> str:
        """The configured member of the Systems collection, or its only one."""
        if self._path:
            return self._path
        systems = self._inside(_dict(self._get(_ROOT).get("Systems")).get("@odata.id"))
        members = self._get(systems).get("Members")
        paths = [self._inside(_dict(one).get("@odata.id")) for one in members] if isinstance(members, list) else []
        found = [path for path in paths if not self._system or path.rstrip("/").split("/")[-1] == self._system]
        if len(found) != 1:
            wanted = f"one named {self._system}" if self._system else 'one (choose it with system = "...")'
            raise BmcError(f"{self._where}: {len(found)} of {len(paths)} systems fit, expected {wanted}", is_final=True)
        self._path = found[0]
        return found[0]

    def _inside(self, path: object) -> str:
        """A path of this BMC. Raises BmcError where it points elsewhere."""
        if not isinstance(path, str) or not path.startswith("/redfish/") or not path.isprintable() or " " in path:
            raise BmcError(f"{self._where}: not a Redfish path: {str(path)[:80]!r}", is_final=True)
        return path

    def _get(self, path: str) -> dict[str, Any]:
        answer = self._request("GET", path)
        try:
            return _dict(json.loads(answer))
        except (ValueError, RecursionError):
            raise BmcError(f"{self._where}{path}: the answer is not JSON") from None

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {**self._headers, **({"Content-Type": "application/json"} if body else {})}
        try:
            with within(self._timeout_s), contextlib.closing(self._connection()) as connection:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_ANSWER)
        except ssl.SSLCertVerificationError as error:
            raise BmcError(
                f"{self._where}: certificate refused: {error.verify_message} (see ca_file)", is_final=True
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BmcError(f"{self._where}: {type(error).__name__}: {error}") from None
        if answer.status in (401, 403):
            raise BmcError(f"{self._where}: the BMC refuses user {self._user} ({answer.status})", is_final=True)
        if answer.status not in (200, 202, 204):
            is_final = 400 <= answer.status < 500 and answer.status not in _BUSY
            raise BmcError(f"{self._where}{path}: HTTP status {answer.status}", is_final)
        return text

    def _connection(self) -> http.client.HTTPSConnection:
        try:
            context = ssl.create_default_context(cafile=self._ca_file or None)
            return _Connection(self._where, timeout=self._timeout_s, context=context)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BmcError(f"{self._where}: ca_file or address cannot be used: {error}", is_final=True) from None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
