"""Accounts with the name of a user. Their names identify a person as much as the user's name does."""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.store.cluster_store import ClusterStore

_SQL = """
SELECT DISTINCT a.account, j."user" FROM (SELECT unnest($accounts) AS account) a
JOIN jobs j ON lower(j."user") = lower(a.account)
"""


def personal_accounts(store: ClusterStore, accounts: Iterable[str]) -> dict[str, str]:
    """The user with an account's name, by account. Case does not count: Slurm keeps accounts in lower case.

    Covers every user with a job in the store, at any time and on any cluster. Raises StoreError.
    """
    wanted = [account for account in accounts if account]
    rows = {row for each in store.every_cluster() for row in _matches(each, wanted)}
    found = dict(sorted(rows, reverse=True))
    return found | {account: account for account, user in rows if account == user}


def _matches(store: ClusterStore, accounts: list[str]) -> list[tuple[str, str]]:
    with store.connect() as db:
        store.view(db, "jobs", ("user",))
        return db.execute(_SQL, {"accounts": accounts}).fetchall()
