"""A broker's peers are hidden from the services behind the proxy, and nothing else is touched."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.cli.cluster.peer_filter import PeerFilter

OTHERS = {"connect_urls": ["10.0.0.2:4222", "10.0.0.3:4222"], "ws_connect_urls": ["10.0.0.2:80"]}
OWN = {"server_id": "A", "max_payload": 1048576, "nonce": "x"}


def info(**fields: object) -> bytes:
    return b"INFO " + json.dumps(fields, separators=(",", ":")).encode() + b"\r\n"


NEWS, KEPT = info(**OWN, **OTHERS), info(**OWN)
TRICK = b"MSG a.b 1 %d\r\n%s\r\n" % (len(NEWS), NEWS)
HEADED = b"HMSG a.b 1 r 12 %d\r\nNATS/1.0\r\n\r\n%s\r\n" % (12 + len(NEWS), NEWS)
PLAIN = b"PING\r\nPONG\r\n+OK\r\n-ERR 'no'\r\nMSG s 1 r 0\r\n\r\n" + KEPT


def test_addresses_of_others_are_left_out_of_the_first_info_and_of_later_ones() -> None:
    said = PeerFilter()
    assert said.without_peers(NEWS) == KEPT
    assert said.without_peers(b"PONG\r\n" + NEWS + b"PING\r\n") == b"PONG\r\n" + KEPT + b"PING\r\n"


def test_everything_else_passes_as_it_is_also_a_payload_that_looks_like_an_info() -> None:
    for passed in (KEPT, PLAIN, TRICK, HEADED):
        assert PeerFilter().without_peers(passed) == passed


@given(st.lists(st.sampled_from([NEWS, PLAIN, TRICK, HEADED])), st.data())
def test_it_does_not_matter_where_the_bytes_are_cut(
    parts: list[bytes], data: st.DataObject
) -> None:
    said, sent = PeerFilter(), b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)))))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    expected = b"".join(KEPT if part is NEWS else part for part in parts)
    assert b"".join(map(said.without_peers, pieces)) == expected


@pytest.mark.parametrize(
    "foreign",
    [
        b"\x16\x03\x01" + NEWS,
        b"hello\r\n" + NEWS,
        b"MSG a 1 many\r\n" + NEWS,
        b"MSG a 1 " + b"9" * 5000 + b"\r\n" + NEWS,
        b"INFO nothing\r\n",
        b"INFO [1]\r\n",
        b"INFO 1\r\n",
    ],
)
def test_what_is_not_nats_passes_as_it_is(foreign: bytes) -> None:
    said = PeerFilter()
    assert said.without_peers(foreign) == foreign
    assert said.without_peers(b"\x17rest") == b"\x17rest"


@given(st.binary(), st.binary())
def test_no_bytes_break_it_and_none_are_lost(first: bytes, then: bytes) -> None:
    said = PeerFilter()
    assert said.without_peers(first) + said.without_peers(then) + said.rest() == first + then
