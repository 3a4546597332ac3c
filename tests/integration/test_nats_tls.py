"""A broker that asks for TLS gets it, for large messages too."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.connection import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.log import all_of, specs, stored
from tests.support.nats_server import NatsServer

OPENSSL = shutil.which("openssl")
pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with"),
]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself; its key lies beside it."""
    made = tmp_path / "cert.pem"
    subprocess.run(
        (
            *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(made)),
        ),
        check=True,
        capture_output=True,
    )
    return made


@pytest.fixture
def secured(tmp_path: Path, certificate: Path) -> Iterator[NatsServer]:
    key = certificate.with_name("key.pem")
    settings = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\n'
    server = NatsServer(tmp_path / "nats", settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def test_large_messages_go_through_tls(
    secured: NatsServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url, names = secured.url.replace("nats://", "tls://"), Subjects("t")
    sent = [bytes([i]) * 700_000 for i in range(40)]
    async with NatsBus(url, options=NatsOptions(connect_timeout_s=10.0)) as bus:
        await bus.declare(specs("t"))
        receipts = [await bus.publish(names.chunk(0, "snapshot", 0, i), sent[i]) for i in range(40)]
        wanted = [receipt.sequence for receipt in receipts]
        found = await all_of(bus.get_each(names.chunk(0, "snapshot", 0), wanted))
        assert [record.payload for record in found] == sent
        secured.restart()
        assert (await stored(bus, names.stream("STATE"), wanted[7])).payload == sent[7]


async def test_a_certificate_of_an_unknown_authority_is_refused(secured: NatsServer) -> None:
    url = secured.url.replace("nats://", "tls://")
    with pytest.raises(BrokerUnavailable, match="certificate"):
        async with NatsBus(url, options=NatsOptions(connect_timeout_s=3.0)):
            pass
