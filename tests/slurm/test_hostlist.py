"""Host lists: expanded within a limit, folded, and looked up among known hosts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm.host_index import HostIndex
from slurm.hostlist import count, expand, fold


def test_host_lists_as_slurm_writes_them() -> None:
    for text, hosts in [
        ("", ()), ("n1", ("n1",)), ("n[1-3,7]", ("n1", "n2", "n3", "n7")), ("n10,n2", ("n2", "n10")),
        ("n[008-010]", ("n008", "n009", "n010")), ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("login1,gpu-a[1-2]", ("gpu-a1", "gpu-a2", "login1")), ("n1,n1,n[1-2]", ("n1", "n2")),
        ("n1.cluster.example", ("n1.cluster.example",)),
    ]:  # fmt: skip
        assert expand(text) == hosts
        assert count(text) == len(hosts)


@pytest.mark.parametrize(
    "text",
    ["@all", "n1!n2", "n1&n2", "n1^n2", "n*", "n[1-3/2]", "n[1-2", "n1]", "n[]", "n[3-1]", "n[a-b]", "n 1", "n1;reboot",
     "n1\nn2", "n1,", ",", "n[1-2],,n3", "$(id)", "n[[1-2]]", "n[٣]"],
)  # fmt: skip
def test_what_is_no_host_list_of_slurm_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        expand(text)


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-999][1-999][1-999]", ",".join(["n[1-60000]", "m[1-60000]"]), "n" * (1 << 21)]
)
def test_a_host_list_without_bounds_is_refused_before_it_is_expanded(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand(text)


def test_the_limit_is_the_callers() -> None:
    assert len(expand("n[1-100]", limit=100)) == 100
    with pytest.raises(ValueError, match="more than 99 hosts"):
        expand("n[1-100]", limit=99)


def test_fold_is_shortest() -> None:
    assert fold(["n7", "n2", "n1", "n3", "n2"]) == "n[1-3,7]"
    assert fold([]) == ""


@pytest.mark.parametrize("name", ["", "a,b", "n[1-2]", "@all", "a b", "a\n"])
def test_only_host_names_are_folded(name: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        fold(["n1", name])


@given(st.sets(st.from_regex(r"[a-c]{1,2}(0?[0-9]{1,2})", fullmatch=True), max_size=30))
def test_folded_hosts_expand_to_themselves(hosts: set[str]) -> None:
    assert set(expand(fold(hosts))) == hosts


@given(st.text(alphabet="n12[]-,.@", max_size=20))
def test_no_text_gives_anything_but_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = expand(text, limit=1000)
    except ValueError:
        return
    assert len(hosts) <= 1000


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
    monkeypatch.setattr("slurm.host_index.expand", lambda text: pytest.fail(f"{text} was expanded"))
    index = HostIndex([f"nid{number:06d}" for number in range(1, 20_001)])
    for first in (1, 250, 500):
        assert len(index.places(f"nid[{first:06d}-{first + 19_000:06d}]")) > 18_000
