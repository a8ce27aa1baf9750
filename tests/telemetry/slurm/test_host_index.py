"""Places of hosts against the expanded list."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telemetry.slurm.host_index import HostIndex
from telemetry.slurm.hostlist import expand

NAMES = (
    [f"n{number}" for number in range(25)] + [f"n{number:02d}" for number in range(25)]
    + [f"n{number:03d}" for number in range(90, 115)]
    + ["login", "gpu-a", "n7-ib", "n8-ib", "r1n1", "r1n2", "r2n1", "n"]
)  # fmt: skip
_NUMBER = st.sampled_from(["0", "00", "1", "01", "7", "8", "08", "9", "10", "11", "23", "090", "099", "101", "1000"])
_RANGE = st.one_of(_NUMBER, st.tuples(_NUMBER, _NUMBER).map("-".join))
_BRACKET = st.lists(_RANGE, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
_TERM = st.one_of(
    st.sampled_from([*NAMES, "other", "n1x"]),
    st.tuples(st.sampled_from(["n", "n1", "", "r"]), _BRACKET, st.sampled_from(["", "", "-ib", "n1", "0"])).map(
        "".join
    ),
    st.tuples(_BRACKET, _BRACKET).map(lambda pair: f"r{pair[0]}n{pair[1]}"),
)


@given(st.lists(_TERM, max_size=4).map(",".join))
@example("n[8-11]")
@example("n[08-11]")
@example("n[098-101,7],n7-ib,n[7-8]-ib")
@example("n[1-010]")
def test_places_are_those_of_the_expanded_list(text: str) -> None:
    index = HostIndex(NAMES)
    try:
        expected = sorted(set(expand(text)) & set(NAMES))
    except ValueError:
        with pytest.raises(ValueError, match=r"host|range"):
            index.places(text)
        return
    assert [index.names[place] for place in index.places(text).tolist()] == expected


@pytest.mark.parametrize("text", ["n[1-", "n1]", "@all", "n1!n2", "n[3-1]", "n[0-99999999]", "n 1", "n1\n", "n[*]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|range"):
        HostIndex(NAMES).places(text)


def test_long_lists_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.slurm.host_index.expand", lambda text: pytest.fail(f"{text} was expanded"))
    index = HostIndex([f"nid{number:06d}" for number in range(1, 20_001)])
    for first in (1, 250, 500):
        assert len(index.places(f"nid[{first:06d}-{first + 19_000:06d}]")) > 18_000
