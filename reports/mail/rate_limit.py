"""How many mails each user can still get within mail.per_user_hour.

The limit applies when mails are queued. The mails of the last hour and the queued mails together never exceed it, so no
hour has more mails, even after the server was down. Weekly digests come on top: their readers get nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from almanac.config import Mail
from reports.mail.outbox import Outbox

HOUR_S = 3600


@dataclass(frozen=True)
class UserRateLimit:
    """sent_s: by user, times of the mails of the last hour, in order. queued: by user, mails that are not sent yet."""

    config: Mail
    now_s: int
    sent_s: defaultdict[str, list[int]]
    queued: Counter[str]

    def left(self, user: str) -> int:
        """Mails that can be queued for the user now."""
        return max(0, self.config.per_user_hour - self.queued[user] - len(self.sent_s[user]))

    def most(self, user: str) -> int:
        """Reports that go out as single mails now. More of them become one digest."""
        return min(self.config.storm, max(1, self.left(user)))

    def next_s(self, user: str) -> int:
        """The time of the next mail if none is left now, as if all queued mails went out now."""
        over = len(self.sent_s[user]) + self.queued[user] - self.config.per_user_hour
        times = [*self.sent_s[user], *[self.now_s] * self.queued[user]]
        return times[over] + HOUR_S


def user_rate_limit(outbox: Outbox, config: Mail, now_s: int) -> UserRateLimit:
    sent_s = defaultdict[str, list[int]](list)
    for user, time_s in outbox.sent_since(now_s - HOUR_S + 1):
        sent_s[user].append(min(time_s, now_s))
    return UserRateLimit(config, now_s, sent_s, outbox.queued())
