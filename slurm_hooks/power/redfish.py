"""A node's power through Redfish (DMTF DSP0266), by the library sushy: ComputerSystem.Reset over HTTPS.

The certificate is always verified, no proxy is used, and the password goes to the BMC only: no answer leads elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urljoin

import requests
import sushy
from sushy.auth import BasicAuth
from sushy.connector import Connector

from slurm_hooks.power.bmc_file import BmcError, RedfishTable
from telemetry.sources.bounded_session import BoundedAdapter, BoundedSession

_MOST_ANSWER = 1 << 20
_BUSY = (408, 409, 429)
_RESETS = {"on": sushy.ResetType.ON, "off": sushy.ResetType.FORCE_OFF, "soft": sushy.ResetType.GRACEFUL_SHUTDOWN}
_POWER = {
    # A node on its way off is still on, and the next look says more.
    sushy.PowerState.ON: "on", sushy.PowerState.POWERING_ON: "on", sushy.PowerState.POWERING_OFF: "on",
    sushy.PowerState.OFF: "off",
}  # fmt: skip


class Redfish:
    """One node's ComputerSystem. timeout_s is for each request."""

    can_soften = True

    def __init__(self, bmc: RedfishTable, node: str, timeout_s: float) -> None:
        self._bmc, self._where = bmc, bmc.address.replace("{node}", node)
        self._wanted = bmc.system.replace("{node}", node)
        self._connector = _Connector(f"https://{self._where}/", timeout_s, bmc.ca_file or True)
        self._found: Any = None

    def status(self) -> str | None:
        with self._errors():
            power = self._system().power_state
        if power not in _POWER:
            raise BmcError(f"{self._where}: PowerState is not On or Off")
        return _POWER[power]

    def set(self, wanted: Literal["on", "off", "soft"]) -> None:
        """Set the power state, in one request after a look at the status: Slurm was asked just before."""
        with self._errors():
            (self._found or self._system()).reset_system(_RESETS[wanted])

    def _system(self) -> Any:
        """The configured member of the Systems collection, or its only one, as it is now."""
        if self._found:
            self._found.refresh(force=True)
            return self._found
        login = BasicAuth(self._bmc.user.encode(), self._bmc.password.encode())  # in UTF-8; requests' own is Latin-1
        root = sushy.Sushy("", auth=login, connector=self._connector)
        paths = [str(path) for path in root.get_system_collection().members_identities]
        fit = [path for path in paths if not self._wanted or path.rstrip("/").split("/")[-1] == self._wanted]
        if len(fit) != 1:
            wanted = f"one named {self._wanted}" if self._wanted else 'one (choose it with system = "...")'
            raise BmcError(f"{self._where}: {len(fit)} of {len(paths)} systems fit, expected {wanted}", is_final=True)
        self._found = root.get_system(fit[0])
        return self._found

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise BmcError for whatever an answer makes of sushy."""
        try:
            yield
        except BmcError:
            raise
        except requests.exceptions.SSLError as error:
            _, is_refused, why = str(error).partition("certificate verify failed: ")
            said = f"certificate refused: {why} (see ca_file)" if is_refused else f"no TLS: {error}"
            raise BmcError(f"{self._where}: {said}", bool(is_refused)) from None
        except Exception as error:
            why = str(error).rpartition("(Caused by ")[2][:200]
            raise BmcError(f"{self._where}: {type(error).__name__}: {why}") from None


class _Connector(Connector):  # type: ignore[misc]
    """Sends each request once, to this BMC only: sushy's own would repeat a Reset without another question to Slurm."""

    def __init__(self, url: str, timeout_s: float, verify: str | bool) -> None:
        super().__init__(url, verify=verify)
        self._timeout_s = timeout_s
        session = self._session = BoundedSession()
        session.trust_env = False
        session.adapters.clear()
        session.mount(url, BoundedAdapter())
        session.headers.update({"Accept": "application/json", "OData-Version": "4.0", "Connection": "close"})

    def _op(self, method: str, path: str = "", data: object = None, **_: Any) -> requests.Response:
        url = urljoin(self._url, path)
        answer, body = self._session.fetch(
            method, url, json=data, verify=self._verify, timeout=self._timeout_s, most_bytes=_MOST_ANSWER
        )
        status = answer.status_code
        if status in (401, 403):
            raise BmcError(f"the BMC refuses user and password of the BMC file ({status})", is_final=True)
        if status not in (200, 202, 204):
            raise BmcError(f"{url}: HTTP status {status}", 400 <= status < 500 and status not in _BUSY)
        answer._content = body
        return answer
