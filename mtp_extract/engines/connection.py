"""Requests to one server, many at a time, in an event loop of their own.

The loop runs in a thread, so that callers need none, and may have one. What a server sends is untrusted: a request has
one deadline for all of it, head and body, and what cannot be HTTP ends it. The client of `io/remote.py` is not used: it
may be offline, or hold what an application put there for the Hub.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from mtp_extract.errors import ServerError, escape
from mtp_extract.io.http_library import http_library

T = TypeVar("T")

_CONNECT_TIMEOUT = 10.0  # seconds
_KEEP_ALIVE = 4.0  # seconds a connection is kept; servers close theirs after 5
_REACH = "Check that it runs, and its address"


class Connection:
    """To the server at ``root``, a URL without login, query and fragment.

    Args:
        headers: sent with every request.

    Connections are made when there is something to ask, and closed by :meth:`close`.
    """

    def __init__(self, root: str, headers: Mapping[str, str]) -> None:
        self._root = root
        self._loop = asyncio.new_event_loop()
        # A daemon: whoever is told to stop does not wait for answers.
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self.run(self._open(headers))

    def _turn(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, or raises, in the loop."""
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def close(self) -> None:
        """End what is under way."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self, headers: Mapping[str, str]) -> aiohttp.ClientSession:
        parts = urlsplit(self._root)
        proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
        # Certificates are trusted as everywhere in this package.
        trusted = http_library().create_ssl_context() if parts.scheme == "https" else False
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE, ssl=trusted),
            headers=dict(headers),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            proxy=proxy,
        )

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    @asynccontextmanager
    async def request(self, path: str, seconds: float, content: bytes | None = None) -> AsyncIterator[Any]:
        """The response to a GET, or to a POST of JSON where there is ``content``; over within ``seconds``.

        Raises:
            ServerError: it cannot be had, or its body not be read to the end.
        """
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_TIMEOUT))
        method, more = ("GET", {}) if content is None else ("POST", {"Content-Type": "application/json"})
        try:
            async with self._session.request(
                method, self._root + path, data=content, headers=more, timeout=limits, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"the server does not answer in time. {_REACH}.", remedies=("timeout",)) from None
        except asyncio.TimeoutError:
            # What a page may take is no caller's choice.
            remedies = ("timeout",) if content is not None else ()
            raise ServerError(f"expected an answer within {seconds:g} seconds", remedies=remedies) from None
        except aiohttp.ClientConnectorError as error:
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else escape(error.strerror or error.os_error)
            raise ServerError(f"the server cannot be reached: {reason}. {_REACH}.") from None
        except (aiohttp.InvalidURL, UnicodeError):
            raise ServerError("this is not an address that can be requested") from None
        except (aiohttp.ClientError, ConnectionError):
            # What it wrote is never repeated: it may quote the request, and with it a key.
            raise ServerError(
                "the connection was lost, or what came over it is not HTTP. Its log may say why, if it speaks HTTP."
            ) from None
