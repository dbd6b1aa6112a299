"""One deadline for every request, its head included: what no timeout of an HTTP library sees.

Their timeouts are of one read from a socket. A head that trickles in, or one ``100 Continue`` after the other, meets
all of them and never ends. Here a thread closes the connections when time has run out, and whoever waits for them gets
an error at the next read at the latest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mtp_extract.errors import MtpExtractError

_AGAIN = 1.0  # seconds


class LateError(Exception):
    """A request did not end in its time. ``str()`` says which."""


class Watch:
    """The time that is left. Made by :func:`watched`."""

    def __init__(self, seconds: float, end: Callable[[], object]) -> None:
        self.late = False
        self._seconds, self._end = seconds, end
        self._until = time.monotonic() + seconds
        self._done, self._lock = threading.Event(), threading.Lock()

    def restart(self) -> None:
        """Enough came: all of the time is left again."""
        self._until = time.monotonic() + self._seconds

    def stop(self) -> None:
        """The request has ended: its time runs out no more."""
        with self._lock:
            self._done.set()

    def run(self) -> None:
        """Wait, and end the request if need be."""
        while not self._done.wait(self._until - time.monotonic()):
            with self._lock:
                self.late |= not self._done.is_set() and time.monotonic() >= self._until
            if self.late:
                self._end()
                # A library that asks again by itself is stopped again.
                self._until = time.monotonic() + _AGAIN


@contextmanager
def watched(seconds: float, end: Callable[[], object]) -> Iterator[Watch]:
    """Give what happens inside ``seconds``, and as many again whenever the watch is restarted.

    Args:
        seconds: before it is ended.
        end: closes the connections, from another thread.

    Raises:
        LateError: it was ended; in place of whatever its reads raised then.
    """
    watch = Watch(seconds, end)
    threading.Thread(target=watch.run, daemon=True).start()
    try:
        yield watch
    except MtpExtractError:
        raise
    except Exception as error:
        watch.stop()
        if watch.late:
            raise LateError(f"it took more than {seconds:g} seconds") from error
        raise
    finally:
        watch.stop()
