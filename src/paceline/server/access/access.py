"""Access: what a server asks of those who reach it, and where it may be reached at all."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.core.errors import ConfigError
from paceline.server.access.keys import KeyGuard
from paceline.server.parameters import ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask."""

    api_keys: tuple[str, ...] = ()  # of several each is a client
    origins: tuple[str, ...] = ()  # of web pages that may ask; "*" for all
    certfile: str | None = None  # PEM: TLS is spoken where there is one
    keyfile: str | None = None  # PEM; None: it is in certfile

    def __post_init__(self) -> None:
        """Raises ConfigError for a key that anybody brings."""
        for key in self.api_keys:
            if not key.strip():
                raise ConfigError.about(
                    "--api-key",
                    expected="a key that is not blank",
                    got=repr(key),
                    remedy="set one, in PACELINE_API_KEY too, or leave both out to ask for none",
                )

    def require_safe(self, host: str, *, allows_no_key: bool) -> None:
        """Raise ConfigError for an address that others reach without a key."""
        if self.api_keys or allows_no_key or _is_loopback(host):
            return
        raise ConfigError.about(
            "--host",
            expected="a loopback address while no key is asked for",
            got=host,
            remedy="set --api-key or --api-key-file, or pass --allow-no-key",
        )

    def require_tls(self) -> None:
        """Raise ConfigError for files that are no certificate and its key."""
        if self.certfile is None:
            if self.keyfile is not None:
                raise ConfigError.about(
                    "--ssl-keyfile",
                    expected="given with --ssl-certfile",
                    got="alone",
                    remedy="name the certificate, too",
                )
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.certfile, self.keyfile
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError.about(
                "--ssl-certfile and --ssl-keyfile",
                expected="a certificate and its key, in PEM",
                got=str(error),
                remedy="name files that this user can read",
            ) from error

    def guard(self, app: FastAPI) -> None:
        """Let nobody else reach `app`; the answer to a browser's first question needs no key."""
        if self.api_keys:
            app.add_middleware(KeyGuard, api_keys=self.api_keys)
        if self.origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=list(self.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After", ignored.HEADER],
            )


OPEN_ACCESS = Access()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; lines that begin with # are none.  Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.about(
            "--api-key-file",
            expected="a text file with a key in each line",
            got=str(error),
            remedy="name a file that this user can read",
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError.about(
            "--api-key-file",
            expected="a text file with a key in each line",
            got="one without keys",
            remedy="add a key, or leave the flag out",
        )
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
