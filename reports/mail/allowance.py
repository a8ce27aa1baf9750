"""How many mails users may still get, of mail.per_user_hour."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from almanac.config import Mail
from reports.mail.outbox import Outbox

HOUR_S = 3600


@dataclass(frozen=True)
class Allowance:
    """sent_s: by user, when mails went to them within the last hour, in order. queued: those that will go as well."""

    config: Mail
    now_s: int
    sent_s: defaultdict[str, list[int]]
    queued: Counter[str]

    def left(self, user: str) -> int:
        """Mails that may be queued for them now; 0 where what is queued uses it up."""
        return max(0, self.config.per_user_hour - self.queued[user] - len(self.sent_s[user]))

    def most(self, user: str) -> int:
        """More reports than this at once become one mail."""
        return min(self.config.storm, max(1, self.left(user)))

    def until_s(self, user: str) -> int:
        """When one more may go, where none is left: what is queued counts as sent now."""
        over = len(self.sent_s[user]) + self.queued[user] - self.config.per_user_hour
        times = [*self.sent_s[user], *[self.now_s] * self.queued[user]]
        return times[over] + HOUR_S


def allowance_of(outbox: Outbox, config: Mail, now_s: int) -> Allowance:
    sent_s = defaultdict[str, list[int]](list)
    for user, time_s in outbox.sent_since(now_s - HOUR_S + 1):
        sent_s[user].append(min(time_s, now_s))
    return Allowance(config, now_s, sent_s, outbox.queued())
