"""A broker that asks for TLS gets it, for large messages too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable, BrokerUnfit
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.certificates import needs_openssl, self_signed
from tests.support.log import all_of, specs, stored
from tests.support.nats_server import NatsServer

WORD = "word"
pytestmark = [pytest.mark.nats, needs_openssl]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return self_signed(tmp_path)


@contextmanager
def serving(folder: Path, certificate: Path, more: str = "") -> Generator[NatsServer]:
    key = certificate.with_name("tls.key")
    settings = f'tls {{ cert_file: "{certificate}", key_file: "{key}", {more} }}\n'
    server = NatsServer(folder / "nats", settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def secured(tmp_path: Path, certificate: Path) -> Iterator[NatsServer]:
    with serving(tmp_path, certificate) as server:
        yield server


async def test_large_messages_go_through_tls(
    secured: NatsServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url, names = secured.url.replace("nats://", "tls://"), Subjects("t")
    sent = [bytes([i]) * 700_000 for i in range(40)]
    async with NatsBus(url, options=NatsOptions(connect_timeout_s=10.0)) as bus:
        await bus.declare(specs("t"))
        receipts = [
            await bus.publish(names.shard(0).chunk(0, "snapshot", 0, i), sent[i]) for i in range(40)
        ]
        wanted = [receipt.sequence for receipt in receipts]
        found = await all_of(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted))
        assert [record.payload for record in found] == sent
        secured.restart()
        assert (await stored(bus, names.shard(0).stream("STATE"), wanted[7])).payload == sent[7]


async def test_a_certificate_of_an_unknown_authority_is_refused(secured: NatsServer) -> None:
    url = secured.url.replace("nats://", "tls://")
    with pytest.raises(BrokerUnfit, match=r"\(self-signed certificate\): name .* nats\.ca_file"):
        async with NatsBus(url):
            pass


async def test_a_named_authority_vouches_for_the_broker(
    secured: NatsServer, certificate: Path
) -> None:
    options = NatsOptions(ca_file=certificate, connect_timeout_s=5.0)
    async with NatsBus(secured.url, options=options) as bus:
        await bus.declare(specs("t"))


@pytest.mark.parametrize("handshake_first", [False, True])
async def test_a_client_shows_its_own_certificate(
    tmp_path: Path, certificate: Path, handshake_first: bool
) -> None:
    more = f'ca_file: "{certificate}", verify: true'
    if handshake_first:
        more += ", handshake_first: 300ms"  # who does not begin with TLS is greeted after that
    options = NatsOptions(ca_file=certificate, connect_timeout_s=2.0)
    key = certificate.with_name("tls.key")
    own = replace(options, cert_file=certificate, key_file=key, handshake_first=handshake_first)
    with serving(tmp_path, certificate, more) as server:
        async with NatsBus(server.url, options=own) as bus:
            await bus.declare(specs("t"))
        said = None if handshake_first else "asks for a certificate, and refused nats.cert_file"
        with pytest.raises(BrokerUnavailable, match=said):
            async with NatsBus(server.url, options=options):
                pass


async def test_nothing_is_sent_to_a_broker_that_should_speak_tls_and_does_not(
    certificate: Path,
) -> None:
    heard = bytearray()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "X", "version": "2.12.0", "headers": True, "max_payload": 1048576}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        heard.extend(await reader.read())
        writer.close()

    options = NatsOptions(user="a", password=WORD, ca_file=certificate, connect_timeout_s=1.0)
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match="does not speak TLS"):
            async with NatsBus(url, options=options):
                pass
    assert not heard
