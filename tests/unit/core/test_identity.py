"""Identity: two trust domains have one key only where they are one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.identity import Principal, TrustDomain, uid_principal_id

parts = st.text("01:a", max_size=6)
ids = st.none() | st.text("01:a", min_size=1, max_size=6)
domains = st.builds(TrustDomain, parts, ids, ids)


@pytest.mark.row("S2")
@given(domains, domains)
def test_keys_are_equal_for_equal_domains_only(one: TrustDomain, other: TrustDomain) -> None:
    assert (one.key == other.key) == (one == other)


@pytest.mark.row("S2")
def test_no_two_of_many_close_domains_share_a_key() -> None:
    words = ["0", "1", "0:", ":0", "1:0", "0:0:", "10"]
    some = [TrustDomain(p, a, s) for p, a, s in product(words, [None, *words], [None, *words])]
    assert len({domain.key for domain in some}) == len(some)


def test_a_principal_without_scopes_may_do_nothing() -> None:
    assert Principal("somebody").scopes == frozenset()


def test_unix_users_have_an_id_of_their_own() -> None:
    assert uid_principal_id(0) == "uid:0"
    assert uid_principal_id(1000) == "uid:1000"
