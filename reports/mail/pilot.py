"""The pilot of mail.users and mail.accounts: while either is set, only they get mail."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Mail
from telemetry.store.cluster_store import ClusterStore

OUTSIDE = "outside the pilot of mail.users and mail.accounts"


def is_in_pilot(config: Mail, user: str, account: str) -> bool:
    is_open = not config.users and not config.accounts
    return is_open or user in config.users or account in config.accounts


def week_pilot(store: ClusterStore, config: Mail, since_s: int, until_s: int) -> Callable[[str], bool]:
    """Whether a user gets the digest of the jobs that ended in [since_s, until_s): the pilot names the user, or the
    account of one of these jobs. Raises StoreError.
    """
    if not config.accounts:
        return lambda user: is_in_pilot(config, user, "")
    accounts = pa.array(config.accounts, pa.string())
    rows = store.read("jobs", ["user", "end_s"], among={"account": accounts})
    rows = rows.filter((pc.field("end_s") >= since_s) & (pc.field("end_s") < until_s))
    users = {*config.users, *rows["user"].to_pylist()}
    return users.__contains__
