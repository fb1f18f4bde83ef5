"""Keeps what a proposer learned in a file: loaded at start, saved on an interval and at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.file import CacheFileError
from lookahead_vllm.machine import CPUS_AT_START

logger = logging.getLogger(f"vllm.{__name__}")

PAUSE_SECONDS = (
    0.02  # seconds after each chunk of a save beside requests: a save costs a step little
)


class _GivenUpError(Exception):
    """A save beside requests was given up for the last one."""


class Cacheable(Protocol):
    """What a proposer has if it can be kept; see `NGramTrieProposer`."""

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The live arrays by name, and what else there is to know, as JSON."""

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Go on from a snapshot; ValueError if it does not fit."""


class CacheKeeper:
    """The file of one proposer.

    Making one loads the file. A missing one is no error; one that is refused is set aside, and
    the proposer begins with nothing. Until `close`, a thread saves the file every `interval`
    seconds in which something was learned; 0 is never.

    Parameters
    ----------
    proposer : Cacheable
        The proposer; it may be at work while the file is saved.
    path : Path
        The file; its directory must exist.
    interval : float
        Seconds between two saves.
    tokenizer : str
        The fingerprint of the tokenizer in use, see `cache_file.fingerprint`.
    """

    def __init__(self, proposer: Cacheable, path: Path, interval: float, tokenizer: str) -> None:
        self.path = path
        self._proposer = proposer
        self._interval = interval
        self._tokenizer = tokenizer
        self._may_save = self._load()
        self._saved = self._mark()
        self._problem = ""
        """What was said of the last save, if it failed."""
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._may_save:
            self._thread = threading.Thread(
                target=self._save_when_due, name="lookahead-cache", daemon=True
            )
            self._thread.start()

    def save(self, rest: float = 0.0) -> bool:
        """Save the file if something was learned since the last time; False if that failed.

        `rest` is how many seconds to sleep after each chunk. Such a save is given up when `close`
        is called, which makes one of its own.
        """
        mark = self._mark()
        if mark == self._saved or not self._may_save:
            return True
        start = time.perf_counter()
        arrays, facts = self._proposer.snapshot()

        def stand_back() -> None:
            if rest and self._closing.wait(rest):
                raise _GivenUpError

        try:
            size = cache_file.save(self.path, arrays, facts, self._tokenizer, stand_back)
        except _GivenUpError:
            return False
        except OSError as error:
            if str(error) != self._problem:  # the next one may fail alike
                self._problem = str(error)
                logger.warning(
                    "Lookahead's cache could not be saved as %s: %s. What was there is untouched.",
                    self.path,
                    error,
                )
            return False
        self._saved, self._problem = mark, ""
        seconds = time.perf_counter() - start
        logger.info(
            "Lookahead's cache was saved as %s: %d MB in %.1f s.", self.path, size >> 20, seconds
        )
        return True

    def begin_to_save(self) -> None:
        """Save beside requests, now instead of at the end of the interval; returns at once."""
        self._due.set()

    def close(self) -> None:
        """Save for the last time. Once is enough; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()
        self.save()

    def _load(self) -> bool:
        """Load the file; False if nothing can be saved, or should not."""
        start = time.perf_counter()
        may_write = os.access(self.path.parent, os.W_OK | os.X_OK)
        if not may_write:
            logger.warning(
                "Lookahead keeps nothing of what it learns: files in %s cannot be made.",
                self.path.parent.absolute(),
            )
        try:
            arrays, facts = cache_file.load(self.path, self._tokenizer)
            self._restore(arrays, facts)
        except FileNotFoundError:
            logger.info("Lookahead starts cold: there is no cache %s yet.", self.path)
            return may_write
        except PermissionError as error:  # it is somebody else's
            logger.warning("Lookahead starts cold and saves nothing: %s.", error)
            return False
        except (CacheFileError, OSError, ValueError) as error:
            return self._set_aside(error)
        logger.info(
            "Lookahead starts warm: %d n-grams in %d namespaces from %s, in %.1f s.",
            cache_file.count_ngrams(arrays),
            len(facts["namespaces"]),
            self.path,
            time.perf_counter() - start,
        )
        return may_write

    def _restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        capacity = len(self._proposer.snapshot()[0]["edges"])
        if (given := len(arrays.get("edges", ()))) != capacity:
            raise CacheFileError(
                f"it was made for max_nodes={given}, and this server has max_nodes={capacity}"
            )
        self._proposer.restore(arrays, facts)

    def _set_aside(self, error: Exception) -> bool:
        try:
            target = cache_file.set_aside(self.path)
        except FileNotFoundError:  # another server was faster
            target = None
        except OSError as obstacle:
            logger.warning(
                "Lookahead starts cold and saves nothing: the cache %s was refused, %s; and it "
                "could not be set aside: %s.",
                self.path,
                error,
                obstacle,
            )
            return False
        logger.warning(
            "Lookahead starts cold: the cache %s was refused, %s. It was set aside%s.",
            self.path,
            error,
            f" as {target}" if target else " by another server",
        )
        return True

    def _mark(self) -> bytes:
        """Changes whenever something is learned: then a rate or a counter changes too."""
        arrays, facts = self._proposer.snapshot()
        mark = hashlib.blake2b(json.dumps(facts).encode())
        for name, array in arrays.items():
            if name != "edges":
                mark.update(array)  # type: ignore[arg-type]
        return mark.digest()

    def _save_when_due(self) -> None:
        # vLLM binds a CPU worker's threads to cores, and a new thread inherits one of them.
        if CPUS_AT_START:
            with suppress(OSError):  # some of them may be gone
                os.sched_setaffinity(0, CPUS_AT_START)
        while True:
            self._due.wait(self._interval or None)
            self._due.clear()
            if self._closing.is_set():
                return
            self.save(PAUSE_SECONDS)
