"""Accounts that are named like a user, whose names say as much as the user's."""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.store.store import Store

_SQL = """
SELECT DISTINCT a.account, j."user" FROM (SELECT unnest($accounts) AS account) a
JOIN jobs j ON lower(j."user") = lower(a.account)
"""


def personal_accounts(store: Store, accounts: Iterable[str]) -> dict[str, str]:
    """By account the user of that name, but for case: Slurm keeps accounts in lower case. Raises StoreError.

    Users are all who have a job in the store, of any time and cluster: one who ran nothing lately is a person, too.
    """
    wanted = [account for account in accounts if account]
    rows = {row for cluster in store.clusters() for row in _matches(store, cluster, wanted)}
    found = dict(sorted(rows, reverse=True))
    return found | {account: account for account, user in rows if account == user}


def _matches(store: Store, cluster: str, accounts: list[str]) -> list[tuple[str, str]]:
    with store.connect() as db:
        store.view(db, "jobs", cluster, ("user",))
        return db.execute(_SQL, {"accounts": accounts}).fetchall()
