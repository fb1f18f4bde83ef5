"""A cache is loaded at start and saved while the proposer learns. A bad file is set aside."""

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache import keeper as cache_keeper
from lookahead_vllm.draft.cache.keeper import CacheKeeper
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.options.server import LookaheadOptions

ROOT = Path(__file__).parents[3]
TOKENIZER = cache_file.fingerprint({"a": 0})
VOCAB = 600


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.cache"


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    caplog.set_level(logging.INFO, cache_keeper.logger.name)
    # vLLM's logger does not propagate once vLLM is imported.
    monkeypatch.setattr(cache_keeper.logger, "propagate", False)
    monkeypatch.setattr(cache_keeper.logger, "handlers", [caplog.handler])
    return caplog


def new_proposer(max_nodes=4096, **options):
    return NGramTrieProposer(LookaheadOptions(max_nodes=max_nodes, **options))


def teach(proposer, first=100):
    proposer.start("r", [1])
    read(proposer, {"r": range(first, first + 50)})
    proposer.finish("r")


def keep(proposer, path, interval=0, tokenizer=TOKENIZER):
    return CacheKeeper(proposer, path, interval, tokenizer, VOCAB)


def num_answers(proposer):
    return cache_file.count_ngrams(proposer.snapshot()[0])


def wait_for(condition):
    deadline = time.monotonic() + 120  # only a hang takes longer
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_next_start_loads_what_was_learned(path, log):
    proposer = new_proposer()
    keeper = keep(proposer, path)
    assert "starts cold: there is no cache" in log.text
    teach(proposer)
    keeper.close()
    after = new_proposer()
    keep(after, path)
    assert num_answers(after) == num_answers(proposer) > 0
    assert f"starts warm: {num_answers(after)} n-grams in 1 namespaces from {path}" in log.text


def test_what_is_saved_is_copied_by_the_proposer(path, monkeypatch):
    """It knows when no thread writes to the arrays."""
    proposer, copied = new_proposer(), list[int]()

    def copy(source, target):
        copied.append(len(source))
        target[:] = source

    monkeypatch.setattr(proposer, "copy", copy)
    keeper = keep(proposer, path)
    teach(proposer)
    keeper.save()
    assert sum(copied) == sum(array.nbytes for array in proposer.snapshot()[0].values())


def test_the_cache_is_saved_only_after_learning(path):
    proposer = new_proposer()
    keeper = keep(proposer, path)
    keeper.save()
    assert not path.exists()
    teach(proposer)
    keeper.save()
    first = path.stat()
    keeper.save()
    assert path.stat().st_ino == first.st_ino
    teach(proposer)  # the same text again changes only frequencies
    keeper.save()
    assert path.stat().st_ino != first.st_ino


def test_a_thread_saves_at_every_interval_until_close(path):
    proposer = new_proposer()
    keeper = keep(proposer, path, interval=0.01)
    for first in (100, 200, 300):
        teach(proposer, first)
        held = num_answers(proposer)
        wait_for(
            lambda held=held: (
                path.exists() and cache_file.count_ngrams(cache_file.load(path)[0]) == held
            )
        )
    teach(proposer, 400)
    keeper.close()
    assert cache_file.count_ngrams(cache_file.load(path)[0]) == num_answers(proposer)
    assert not keeper._thread.is_alive()
    before = path.stat().st_ino
    teach(proposer, 500)
    keeper.close()
    assert path.stat().st_ino == before  # a closed keeper does not save


def test_the_last_save_cancels_a_background_save(path, monkeypatch):
    monkeypatch.setattr(cache_keeper, "PAUSE_SECONDS", 3600)
    proposer = new_proposer()
    keeper = keep(proposer, path, interval=0.01)
    teach(proposer)
    wait_for(lambda: list(path.parent.glob(".a.cache.*.tmp")))  # the background save is pausing
    saves = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: saves.append(replace(*names)))
    keeper.close()
    assert len(saves) == 1 and os.listdir(path.parent) == ["a.cache"]


def other_ngrams(path):
    arrays, facts = new_proposer().snapshot()
    cache_file.save(path, arrays, {**facts, "suffixes": [1, 2]}, TOKENIZER)


def all_namespaces(path):
    shared = new_proposer(share="all")
    teach(shared)
    cache_file.save(path, *shared.snapshot(), TOKENIZER)
    keep(restored := new_proposer(share="all"), path).close()
    assert num_answers(restored) > 0


def changed(change):
    def save(path):
        arrays, facts = new_proposer().snapshot()
        change(arrays)
        cache_file.save(path, arrays, facts, TOKENIZER)

    return save


def foreign_token(path):
    proposer = new_proposer()
    teach(proposer, VOCAB - 49)
    cache_file.save(path, *proposer.snapshot(), TOKENIZER)


REFUSED = {
    f"it knows the token {VOCAB}, and the model only those below": foreign_token,
    "with another tokenizer": lambda path: cache_file.save(path, *new_proposer().snapshot(), "b"),
    "made for max_nodes=8192, and this server has max_nodes=4096": lambda path: cache_file.save(
        path, *new_proposer(8192).snapshot(), TOKENIZER
    ),
    "n-grams of other lengths": other_ngrams,
    "saved with share='all', without namespaces, and this server has share=": all_namespaces,
    "made for max_nodes=0": lambda path: cache_file.save(
        path, {"other": np.zeros(3)}, {"namespaces": {}}, TOKENIZER
    ),
    "its trials are None, where": changed(lambda arrays: arrays.pop("trials")),
    "its rates are (dtype('int8')": changed(
        lambda arrays: arrays.update(rates=np.zeros(arrays["rates"].shape, np.int8))
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_file_that_is_refused_is_set_aside(path, log, says):
    REFUSED[says](path)
    content = path.read_bytes()
    proposer = new_proposer()
    keeper = keep(proposer, path)
    assert num_answers(proposer) == 0 and not path.exists()
    (aside,) = path.parent.glob("a.cache.refused")
    assert aside.read_bytes() == content
    (warning,) = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert says in warning and str(aside) in warning and "starts cold" in warning
    teach(proposer)
    keeper.close()
    cache_file.load(path, TOKENIZER)
    assert aside.read_bytes() == content


def test_a_failed_save_is_retried(path, log, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    proposer = new_proposer()
    keeper = keep(proposer, path)
    teach(proposer)
    with monkeypatch.context() as patch:
        patch.setattr("lookahead_vllm.kept_file.os.fsync", no_space)
        assert not keeper.save() and not keeper.save()
    assert log.text.count("could not be saved") == 1 and "No space left" in log.text
    assert keeper.save() and path.exists()


# ---- paths at which there is no file ------------------------------------------------------------


def sparse_file(path):
    path.touch()
    os.truncate(path, 2**40)


def link_to_a_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def folder_with_files(path):
    path.mkdir()
    (path / "notes").write_text("notes of mine")


STRANGE = {
    "a sparse file": sparse_file,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a link to a pipe": link_to_a_pipe,
    "a folder with files": folder_with_files,
}


@pytest.mark.parametrize("found", STRANGE)
def test_whatever_is_at_its_path_a_server_starts_cold_without_waiting(path, log, found):
    STRANGE[found](path)
    proposer, loaded = new_proposer(), []

    def start_and_end():
        keeper = keep(proposer, path)
        loaded.append(num_answers(proposer))
        teach(proposer)
        keeper.close()

    thread = threading.Thread(target=start_and_end, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert loaded == [0]
    warnings = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    cold = [warning for warning in warnings if "starts cold" in warning]
    assert len(cold) == (found != "a link to nothing")  # which counts as a missing file
    assert not [warning for warning in warnings if "\n" in warning or len(warning) > 1000]
    if not any("saves nothing" in warning for warning in warnings):
        cache_file.load(path, TOKENIZER)  # the learned answer
    for note in path.parent.rglob("notes"):
        assert note.read_text() == "notes of mine"
