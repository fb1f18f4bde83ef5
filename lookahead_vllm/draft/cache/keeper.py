"""The keeper of a proposer's cache file: loads it at start, saves it regularly and at the end."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.kept_file import RefusedFileError, set_aside
from lookahead_vllm.machine import use_all_cores

if TYPE_CHECKING:
    from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer

logger = logging.getLogger(f"vllm.{__name__}")

PAUSE_SECONDS = 0.02
"""The pause after each chunk of a background save, so that the save slows steps only a little."""


class _CancelledError(Exception):
    """`close` cancelled a background save."""


class CacheKeeper:
    """Keeps one proposer's cache in a file.

    The constructor loads the file. If it is missing or refused, the proposer starts with an empty
    cache; a refused file is set aside. Until `close`, a thread saves the file every `interval`
    seconds if the proposer has learned something.

    The proposer may run meanwhile. With an interval of 0, the file is saved only on `close`.
    `tokenizer` is the `fingerprint` (cache/file.py) of the one in use; the model may know fewer
    tokens, its `vocab_size`.
    """

    def __init__(
        self,
        proposer: NGramTrieProposer,
        path: Path,
        interval: float,
        tokenizer: str,
        vocab_size: int,
    ) -> None:
        self.path = path
        self._proposer = proposer
        self._interval = interval
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._may_save = self._load()
        self._saved_state = self._state_hash()
        self._last_error = ""
        """The error of the last save, empty if it succeeded."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._may_save and interval:
            self._thread = threading.Thread(
                target=self._save_regularly, name="lookahead-cache", daemon=True
            )
            self._thread.start()

    def save(self, pause: float = 0.0) -> bool:
        """Save the file if the proposer has learned something since the last save.

        Sleeps `pause` seconds after each chunk; `close` cancels a save with a pause. Returns False
        if the save failed or was cancelled.
        """
        state = self._state_hash()
        if state == self._saved_state or not self._may_save:
            return True
        start = time.perf_counter()
        arrays, facts = self._proposer.snapshot()

        def wait_after_chunk() -> None:
            if pause and self._closing.wait(pause):
                raise _CancelledError

        try:
            size = cache_file.save(
                self.path, arrays, facts, self._tokenizer, wait_after_chunk, self._proposer.copy
            )
        except _CancelledError:
            return False
        except OSError as error:
            if str(error) != self._last_error:  # log repeated failures once
                self._last_error = str(error)
                logger.warning(
                    "Lookahead's cache could not be saved as %s: %s. What was there is untouched.",
                    self.path,
                    error,
                )
            return False
        self._saved_state, self._last_error = state, ""
        seconds = time.perf_counter() - start
        logger.info(
            "Lookahead's cache was saved as %s: %d MB in %.1f s.", self.path, size // 10**6, seconds
        )
        return True

    def close(self) -> None:
        """Stop the thread and save for the last time; further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.save()

    def _load(self) -> bool:
        """Load the file, and return whether it may be saved."""
        start = time.perf_counter()
        try:
            arrays, facts = cache_file.load(self.path, self._tokenizer)
            self._restore(arrays, facts)
        except FileNotFoundError:
            logger.info("Lookahead starts cold: there is no cache %s yet.", self.path)
            return True
        except PermissionError as error:  # the file belongs to another user
            logger.warning("Lookahead starts cold and saves nothing: %s.", error)
            return False
        except (OSError, ValueError) as error:
            return self._set_aside(error)
        logger.info(
            "Lookahead starts warm: %d n-grams in %d namespaces from %s, in %.1f s.",
            cache_file.count_ngrams(arrays),
            len(facts["namespaces"]),
            self.path,
            time.perf_counter() - start,
        )
        return True

    def _restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        capacity = len(self._proposer.snapshot()[0]["edges"])
        if (saved := len(arrays.get("edges", ()))) != capacity:
            raise RefusedFileError(
                f"it was made for max_nodes={saved}, and this server has max_nodes={capacity}"
            )
        self._proposer.restore(arrays, facts, self._vocab_size)

    def _set_aside(self, error: Exception) -> bool:
        """Rename the refused file, and return whether a new one may be saved."""
        try:
            target = set_aside(self.path)
        except FileNotFoundError:  # another server has renamed it
            target = None
        except OSError as rename_error:
            logger.warning(
                "Lookahead starts cold and saves nothing: the cache %s was refused, %s; and it "
                "could not be set aside: %s.",
                self.path,
                error,
                rename_error,
            )
            return False
        logger.warning(
            "Lookahead starts cold: the cache %s was refused, %s. It was set aside%s.",
            self.path,
            error,
            f" as {target}" if target else " by another server",
        )
        return True

    def _state_hash(self) -> bytes:
        """A hash that changes when the proposer learns.

        Each new edge changes a rate or counter, and each new namespace a counter.
        """
        arrays, _ = self._proposer.snapshot()
        digest = hashlib.blake2b()
        for name, array in arrays.items():
            if name != "edges":
                digest.update(array)  # type: ignore[arg-type]
        return digest.digest()

    def _save_regularly(self) -> None:
        use_all_cores()
        while not self._closing.wait(self._interval):
            self.save(PAUSE_SECONDS)
