"""What one user holds is counted, given back, and takes nothing from another one."""

from __future__ import annotations

import resource

import pytest

from fumehood.http import shares
from fumehood.http.shares import MAX_CONNECTIONS, Shares, most_connections


@pytest.mark.row("D4")
def test_share_is_one_users_and_each_sockets_apart() -> None:
    everybody = Shares(2)
    alice = everybody.of(1000)
    assert [alice.connect("engine") for _ in range(4)] == [True, True, False, False]
    assert alice.connect("control")
    assert everybody.of(1001).connect("engine")
    alice.leave("engine")
    assert everybody.of(1000).connect("engine")
    assert not everybody.of(1000).connect("engine")


def test_share_of_a_user_who_holds_nothing_is_forgotten() -> None:
    everybody = Shares(2)
    alice = everybody.of(1000)
    alice.connect("engine")
    bob = everybody.of(1001)
    bob.connect("control")
    bob.leave("control")
    everybody.of(1002)
    assert everybody.of(1000) is alice
    assert everybody.of(1001) is not bob


@pytest.mark.parametrize(
    ("files", "most"),
    [(100, 50), (1 << 16, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)],
)
def test_one_user_never_takes_all_open_files(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(shares.resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most
