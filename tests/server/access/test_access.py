"""Keys, origins, TLS, and where a server may listen without asking for a key."""

import shutil
import socket
import ssl
import subprocess

import httpx
import pytest
from click.testing import CliRunner
from scripted import scripted

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.server.access.access import Access, read_keys
from paceline.server.limits import ServerLimits

ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def world():
    access = Access(api_keys=("secret", "other"), origins=(ORIGIN,))
    with scripted("hermes", access=access) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "other"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        ({}, 401),
    ],
)
def test_a_key_comes_as_either_api_has_it(world, headers, status) -> None:
    assert httpx.get(f"{world.url}/v1/models", headers=headers).status_code == status


def test_a_page_of_an_allowed_origin_may_ask(world) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    first = httpx.options(f"{world.url}/v1/chat/completions", headers=asks)
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == ORIGIN
    assert httpx.options(
        f"{world.url}/v1/models", headers=asks | {"Origin": "https://other.org"}
    ).status_code == 400  # fmt: skip
    said = {"Origin": ORIGIN, "Authorization": "Bearer secret"}
    answer = httpx.get(f"{world.url}/v1/models", headers=said)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    told = answer.headers["access-control-expose-headers"].split(", ")
    assert told == ["X-Request-Id", "Retry-After", "X-Paceline-Ignored"]


def test_without_origins_no_page_may_ask() -> None:
    with scripted("hermes") as server:
        answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_others_are_not_let_in_without_a_key_unless_that_is_asked_for(host: str) -> None:
    with pytest.raises(ConfigError, match="--host must be a loopback address while no key"):
        Access().require_safe(host, allows_no_key=False)
    Access().require_safe(host, allows_no_key=True)
    Access(api_keys=("k",)).require_safe(host, allows_no_key=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    Access().require_safe(host, allows_no_key=False)


def test_keys_are_read_from_a_file(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n one \n\ntwo\n")
    assert read_keys(path) == ("one", "two")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="one without keys"):
        read_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "absent")


@pytest.mark.parametrize("keys", [("",), ("secret", " "), ("\t",)])
def test_a_blank_key_is_none_that_could_be_asked_for(keys) -> None:
    with pytest.raises(ConfigError, match=r"^--api-key must be a key that is not blank, got '"):
        Access(api_keys=keys)


@pytest.mark.parametrize(
    ("words", "more"), [(("--api-key", ""), {}), ((), {"PACELINE_API_KEY": ""})]
)
def test_a_server_is_not_opened_by_a_blank_key(words, more) -> None:
    done = CliRunner().invoke(app, ["serve", *words], env=more)
    assert done.exit_code == 2
    assert "--api-key must be a key that is not blank, got ''" in done.stderr


def test_a_key_without_a_certificate_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="given with --ssl-certfile"):
        Access(keyfile="key.pem").require_tls()
    with pytest.raises(ConfigError, match="a certificate and its key, in PEM"):
        Access(certfile=str(tmp_path / "absent.pem")).require_tls()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_with_a_certificate_speaks_tls(tmp_path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    access = Access(certfile=str(certificate), keyfile=str(key))
    access.require_tls()
    with scripted("hermes", access=access, limits=ServerLimits(header_s=0.5)) as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as silent:
            assert silent.recv(1) == b"", "it says nothing for a minute of asyncio"
        server.say("Hi.")
        trusted = ssl.create_default_context(cafile=str(certificate))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        url = server.url.replace("http://", "https://")
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, verify=trusted)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/v1/models")
