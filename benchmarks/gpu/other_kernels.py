"""The kernels of a step on the GPU, against the references of the project's tests."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.case import DEVICE, MAX_ERROR, Case, distance
from lookahead_vllm.verify import history
from lookahead_vllm.verify.attention import paged_attention
from lookahead_vllm.verify.attention.reference import reference_paged_attention
from lookahead_vllm.verify.choices import Choices, pack_choices
from lookahead_vllm.verify.latent import LatentCall, latent_attention
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.moves.triton import PagedKVMover
from lookahead_vllm.verify.place import NO_ENTRY, Placer, StepRows
from lookahead_vllm.verify.walk.triton import walk_rows

attention_cases: Any = import_module("tests.support.attention_cases")
latent_cases: Any = import_module("tests.support.latent_cases")
test_attention: Any = import_module("tests.verify.attention.test_paged_attention")
test_history: Any = import_module("tests.verify.history.test_history")
test_place: Any = import_module("tests.verify.place.test_place")
test_moves: Any = import_module("tests.verify.moves.test_triton")
test_walk: Any = import_module("tests.verify.walk.test_walk")

Found = dict[str, Any]
"""`error` and `bound`, or nothing if all is equal; a difference raises."""


def checks() -> Iterator[tuple[str, Callable[[], Found]]]:
    """Names, and functions that check a kernel."""
    yield "rows of a step", check_place
    yield "walk", check_walk
    yield "KV moves", check_moves
    for dtype in (torch.bfloat16, torch.float32):
        yield f"trees in a replayed graph, {dtype}", partial(check_graph, dtype)
        yield f"latent attention, {dtype}", partial(check_latents, dtype)
    for head_size in (128, 256):
        yield f"draft blocks beside contexts, heads of {head_size}", partial(check_merge, head_size)
    yield "a cache of more than 2**31 elements", check_large_cache
    for what in ("penalties", "bad words", "thinking budgets"):
        yield f"{what} at nodes", partial(check_history, what)
    yield "the model's choices", check_choices
    yield "the model's tokens in a replayed graph", check_captured_choices
    for dtype, num_choices in ((torch.bfloat16, 0), (torch.float32, 8)):
        yield f"a captured tail, {dtype}", partial(check_tail, dtype, num_choices)
    yield "an event that graphs record and the host awaits", check_event


def _moved(value: Any) -> Any:
    """The same with all tensors on the device, those in tuples included."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return type(value)(*map(_moved, value)) if isinstance(value, tuple) else value


def check_place() -> Found:
    for seed in range(24):
        groups, is_long = 1 + seed % 2, seed % 3 == 0
        most_requests = 1 if is_long else test_place.ENTRIES
        case = test_place.random_case(seed, 70 if is_long else 9, groups, most_requests)
        blocks = tuple(map(_moved, case.table.blocks))
        table = type(case.table)(*map(_moved, case.table[:3]), blocks, case.table.block_sizes)
        rows, lengths = _moved(test_place.stale_rows(groups)), _moved(test_place.no_lengths())
        packed, num_requests, num_rows = test_place.arguments_of(case)
        Placer(table, rows).place(_moved(packed), num_requests, num_rows, lengths)
        test_place.check(case, type(rows)(*(part.cpu() for part in rows)), lengths.cpu())
    return {}


def check_walk() -> Found:
    for seed in range(40):
        case = test_walk.random_case(
            seed, 4, (0, 4, 9, 20, 70)[seed % 5], 1 + seed % 2, padding=seed % 3
        )
        out = test_walk.poisoned(len(case.ids), len(case.cu_num_logits) - 1, case.width, DEVICE)
        ids, sampled, parents, ends, indices, _ = map(_moved, case.tensors(seed % 2 == 0))
        walk_rows((ids, sampled, parents, indices), ends, out)
        test_walk.check(case, type(out)(*(part.cpu() for part in out)))
    return {}


def check_moves() -> Found:
    for seed in range(4):
        for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            for heads_first in (False, True):
                _check_moves(seed, dtype, heads_first)
    return {}


def _check_moves(seed: int, dtype: torch.dtype, heads_first: bool) -> None:
    shape = (5, 3, 16, 256) if heads_first else (5, 16, 3, 256)
    caches = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3)]
    if not heads_first:
        caches = [cache.transpose(1, 2) for cache in caches]
    bits = torch.int8 if dtype.itemsize == 1 else dtype  # float8 cannot be compared
    before = [cache.view(bits).clone() for cache in caches]
    expected = [cache.clone() for cache in before]
    src, dst, moves = test_moves.path_moves(seed)
    for old, new in zip(before, expected, strict=True):
        for a, b in moves:
            new[b // 16, :, b % 16] = old[a // 16, :, a % 16]
    mover = PagedKVMover(caches)
    if seed % 2:
        mover.move(src.flatten().to(DEVICE), dst.flatten().to(DEVICE))
    else:
        mover.move_paths(src.to(DEVICE), dst.to(DEVICE))
    for cache, new in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(bits), new), (dtype, heads_first, seed)


def check_graph(dtype: torch.dtype) -> Found:
    """A graph captured once, replayed for steps with other trees, contexts and requests."""
    case = Case([900, 40, 3000, 7, 1500, 64], [40] * 6, dtype=dtype)
    fixed = FixedBatch(256, 8, 65, 4096, DEVICE)
    query = torch.zeros(256, *case.query.shape[1:], dtype=dtype, device=DEVICE)
    query[: len(case.query)] = case.query
    output = torch.full_like(query, math.nan)
    call = case.call._replace(query=query, output=output, batch=fixed.batch)
    paged_attention(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(call)
    rng, largest = np.random.default_rng(0), 0.0
    for step in range(12):
        rows = sorted(rng.choice(6, int(rng.integers(1, 7)), replace=False).tolist())
        trees = [attention_cases.random_tree(rng, int(rng.integers(2, 40))) for _ in rows]
        contexts = [int(rng.integers(0, case.contexts[row] + 1)) for row in rows]
        starts = [case.starts[row] for row in rows]
        fixed.fill(TreeBatch.build(trees, rows, starts, contexts) if step else None)
        output.fill_(math.nan)
        graph.replay()
        is_used = torch.zeros(256, dtype=torch.bool, device=DEVICE)
        for start, expected in reference_paged_attention(call, torch.float64):
            rows_of = slice(start, start + len(expected))
            largest = max(largest, distance(output[rows_of], expected))
            is_used[rows_of] = True
        assert output[~is_used].isnan().all(), "a row without a tree was written"
        assert is_used.any() or not step
    return {"error": largest, "bound": MAX_ERROR[dtype]}


def check_merge(head_size: int) -> Found:
    """In graphs, FlashAttention attends to the contexts, and tree attention adds draft blocks."""
    case = Case([900, 40, 3000, 7], [40, 9, 130, 0], head_size=head_size, causal=(3,))
    inputs = case.call._replace(  # so that the logarithms are not rounded to bfloat16
        query=case.query.double(),
        key_cache=case.key_cache.double(),
        value_cache=case.value_cache.double(),
    )
    lse = test_attention.attend_contexts(inputs).to(DEVICE)
    paged_attention(case.call._replace(context_lse=lse))
    return {"error": case.distance(), "bound": case.max_error}


def check_large_cache() -> Found:
    """The pages of the requests are behind 4 GB of others."""
    case = Case([700, 20], [40, 5], pages_before=2**31 // (16 * 2 * 2 * 128))
    error = case.error("auto")
    mover, page = PagedKVMover([case.cache.transpose(1, 2)]), case.block_table[0, 1].long()
    moved = case.cache[page, 3].clone()
    mover.move_paths(*torch.tensor([[[0, 3]], [[0, 1]]], device=DEVICE).add_(page * 16))
    assert torch.equal(case.cache[page, 1], moved)
    return {"error": error, "bound": case.max_error}


def check_history(what: str) -> Found:
    for seed in range(12):
        step = test_history.random_step(seed)
        logits, rows, texts = step.logits.to(DEVICE), _moved(step.rows), _moved(step.texts)
        if what == "penalties":
            expected = test_history.penalized(step)
            history.apply_penalties(logits, rows, _moved(step.penalties))
        elif what == "bad words":
            expected = test_history.without_bad_words(step)
            history.apply_bad_words(logits, rows, texts, _moved(step.words), step.max_words)
        else:
            expected = test_history.with_forced_ends(step)
            slots, thinking = step.slots.to(DEVICE), _moved(step.thinking)
            history.apply_thinking_budgets(logits, rows, slots, texts, thinking)
        wanted = torch.as_tensor(expected, dtype=torch.float32)
        torch.testing.assert_close(logits.cpu(), wanted, atol=1e-5, rtol=1e-5)
    return {}


def check_latents(dtype: torch.dtype) -> Found:
    rng, largest = np.random.default_rng(1), 0.0
    for contexts in ([20, 3000], [700]):
        trees = [attention_cases.random_tree(rng, 20) for _ in contexts]
        case = latent_cases.LatentCase(trees, contexts, 16, 512, 64, 64, dtype)
        batch = type(case.batch)(*map(_moved, vars(case.batch).values()))
        output = torch.full_like(case.output, math.nan, device=DEVICE)
        inputs = case.query.to(DEVICE), case.cache.to(DEVICE), output, case.block_table.to(DEVICE)
        latent_attention(LatentCall(*inputs, batch, case.scale))
        largest = max(largest, distance(output.cpu(), case.reference()))
    return {"error": largest, "bound": attention_cases.ROW_ERROR[dtype]}


def check_choices() -> Found:
    logits = torch.randn(40, 5000, device=DEVICE)
    found = Choices.on_host(pack_choices(logits, 8))
    assert np.array_equal(found.tokens, logits.topk(8).indices.cpu().numpy())
    return {}


def check_captured_choices() -> Found:
    logits = torch.randn(40, 5000, device=DEVICE)
    pack_choices(logits, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = pack_choices(logits, 8)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        found = Choices.on_host(packed)
        assert np.array_equal(found.tokens, logits.topk(8).indices.cpu().numpy())
    return {}


def check_tail(dtype: torch.dtype, num_choices: int) -> Found:
    """A captured tail leaves, to the bit, what the same calls leave outside of a graph; without
    temperatures, the tokens are those of the walk by the book."""
    try:
        from lookahead_vllm.engine.step import tail
    except ImportError as reason:
        return {"left_out": f"it needs vLLM: {reason}"}
    count, requests, vocab = 192, 8, 5000
    ints = partial(torch.zeros, count, dtype=torch.int32, device=DEVICE)
    longs = partial(torch.zeros, count, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(requests + 3, dtype=torch.int32, device=DEVICE)
    rows = StepRows(
        ints(), longs(), ints().bool(), starts, starts[:-1], longs()[None], longs(), ints(), ints(),
        ints(),
    )  # fmt: skip
    logits = torch.zeros(count, vocab, dtype=dtype, device=DEVICE)
    caches = [torch.randn(count // 16, 2, 16, 64, device=DEVICE) for _ in range(2)]
    draws, mover = tail.Draws(requests, torch.device(DEVICE)), PagedKVMover(caches)
    emitted = tail.Emitted.empty(requests + 2, 21, torch.device(DEVICE))
    given: Any = (
        logits,
        rows,
        torch.arange(count, device=DEVICE),
        draws,
        [mover],
        emitted,
        False,
        num_choices,
    )
    tail.run_tail(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tail.run_tail(*given)
    rng = np.random.default_rng(0)
    for seed in range(12):
        case = test_walk.random_case(seed, requests, 20)
        ids, sampled, parents, ends, _, _ = case.tensors()
        for entry in range(requests):
            temperature = float(rng.choice([0, 0.7, 1])) if seed % 2 else 0.0
            draws.add_request(entry, temperature, int(rng.integers(2**62)), True)
        draws.apply_staged_writes()
        own, sizes = slice(len(ids)), ends.diff()
        rows.ids[own], rows.parents[own] = ids, parents
        rows.starts.copy_(torch.cat((ends, ends[-1:].expand(2))))
        rows.entries.fill_(NO_ENTRY)
        rows.entries[own] = torch.arange(requests).repeat_interleave(sizes)
        rows.positions.random_(0, 1000)
        rows.slots.copy_(torch.from_numpy(rng.permutation(count)))
        logits.normal_()
        logits[own].scatter_add_(1, sampled[:, None].to(DEVICE), logits.new_full((len(ids), 1), 9))
        before = [cache.clone() for cache in caches]
        expected = [part.clone() for part in tail.run_tail(*given) if part is not None]
        moved = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        graph.replay()
        left = [part for part in captured if part is not None]
        pairs = zip([*left, *caches], [*expected, *moved], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        if seed % 2 == 0:
            for row, path in enumerate(test_walk.brute_force(case)):
                tokens = captured.tokens[row, : len(path)].tolist()
                assert tokens == [case.sampled[at] for at in path]
                assert captured.num_rejected[row] == sizes[row] - len(path)
    return {}


def check_event() -> Found:
    """Each replay records the event anew, and the host waits for that, as before the chains of a
    trained drafter are overwritten."""
    event, value = torch.cuda.Event(external=True), torch.zeros(1, device=DEVICE)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            torch.cuda._sleep(50_000_000)  # some 30 ms
            value.add_(1)
            event.record()
    value.zero_()
    other = torch.cuda.Stream()  # it waits for no other one
    for step in range(6):
        graphs[step % 2].replay()
        event.synchronize()
        with torch.cuda.stream(other):
            assert value.item() == step + 1, "the host did not wait for the replay"
    return {}
