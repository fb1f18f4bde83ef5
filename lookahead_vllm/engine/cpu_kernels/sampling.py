"""The kernels that draw tokens: temperature, min_p and Gumbel noise.

They take what vLLM's kernels take; `slots` has the slot of each row of logits.
"""

from typing import Any

import numba
import numpy as np

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces

_inline = numba.njit(inline="always")
_LN2 = np.float32(0.6931472)


@replaces("gpu.sample.gumbel._temperature_kernel")
@kernel
def apply_temperature(
    grid: Grid, logits: Array, stride: int, slots: Array, temperatures: Array, vocab: int
) -> None:
    for row in range(grid[0]):
        temperature = temperatures[slots[row]]
        if temperature != 0 and temperature != 1:
            values = logits[row * stride : row * stride + vocab]
            for token in range(vocab):
                values[token] /= temperature


@replaces("gpu.sample.min_p._min_p_kernel")
@kernel
def apply_min_p(
    grid: Grid, logits: Array, stride: int, slots: Array, min_ps: Array, vocab: int
) -> None:
    for row in range(grid[0]):
        min_p = min_ps[slots[row]]
        if min_p == 0:
            continue
        values = logits[row * stride : row * stride + vocab]
        least = values[_first_largest(values)] + np.log(min_p)
        for token in range(vocab):
            if values[token] < least:
                values[token] = -np.inf


@kernel
def _first_largest(values: Array) -> int:
    """The index of the largest float32. Compares integers, which compilers vectorize."""
    bits = values.view(np.int32)
    best = np.int32(-(2**31))
    for i in range(bits.size):
        key = _order(bits[i])
        if key > best:
            best = key
    for i in range(bits.size):
        if _order(bits[i]) == best:
            return i
    return 0


@_inline
def _order(bits: np.int32) -> np.int32:
    """The bits of a float32 as an integer of the same order; -0 and 0 are equal."""
    key = np.int32(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))
    return np.int32(key + (key == -1))


@replaces("gpu.sample.gumbel._gumbel_sample_kernel")
@kernel
def sample_with_noise(
    grid: Grid,
    winners: Array,
    winners_stride: int,
    values: Array,
    values_stride: int,
    cache: Any,
    cache_stride: int,
    cache_column_stride: int,
    cache_column: Any,
    cache_source: Any,
    cache_source_stride: int,
    logits: Array,
    stride: int,
    slots: Array,
    seeds: Array,
    positions: Array,
    temperatures: Array,
    vocab: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """The token with the largest sum of logit and noise, and that sum, in each block of a row."""
    if cache is not None or IS_DRAFTING or USE_FP64:
        raise NotImplementedError("drafting with noise, and noise in float64")
    uniforms, bounds, scaled = np.empty((3, BLOCK_SIZE), np.float32)
    for row in range(grid[0]):
        slot = slots[row]
        is_greedy = slot < 0 or temperatures[slot] == 0
        state = np.uint32(0) if is_greedy else _hash(seeds[slot], positions[row])
        for block in range(grid[1]):
            first = block * BLOCK_SIZE
            part = logits[row * stride + first : row * stride + min(first + BLOCK_SIZE, vocab)]
            if is_greedy:
                winner = _first_largest(part)
                value = part[winner]
            else:
                _draw_uniforms(state, first, uniforms[: part.size])
                if APPLY_TEMPERATURE:
                    for token in range(part.size):
                        scaled[token] = part[token] / temperatures[slot]
                    own = scaled[: part.size]
                    winner, value = _largest_with_noise(own, uniforms[: part.size], bounds)
                else:
                    winner, value = _largest_with_noise(part, uniforms[: part.size], bounds)
            winners[row * winners_stride + block] = first + winner
            values[row * values_stride + block] = value


@_inline
def _mixed(state: np.uint32, key: np.uint32) -> np.uint32:
    """MurmurHash3's step, 32 bits."""
    key = np.uint32(key * np.uint32(0xCC9E2D51))
    key = np.uint32((key << np.uint32(15)) | (key >> np.uint32(17)))
    state = np.uint32(state ^ np.uint32(key * np.uint32(0x1B873593)))
    state = np.uint32((state << np.uint32(13)) | (state >> np.uint32(19)))
    return np.uint32(np.uint32(state * np.uint32(5)) + np.uint32(0xE6546B64))


@_inline
def _finished(state: np.uint32) -> np.uint32:
    """MurmurHash3's finalizer for 16 bytes, 32 bits."""
    state = np.uint32(state ^ np.uint32(16))
    state = np.uint32(state ^ (state >> np.uint32(16)))
    state = np.uint32(state * np.uint32(0x85EBCA6B))
    state = np.uint32(state ^ (state >> np.uint32(13)))
    state = np.uint32(state * np.uint32(0xC2B2AE35))
    return np.uint32(state ^ (state >> np.uint32(16)))


@kernel
def _hash(seed: int, position: int) -> np.uint32:
    """The part of the hash that all tokens of a row share."""
    bits, low = np.uint64(seed), np.uint64(0xFFFFFFFF)
    state = _mixed(np.uint32(0), np.uint32(bits & low))
    state = _mixed(state, np.uint32(bits >> np.uint64(32)))
    return _mixed(state, np.uint32(np.uint64(position) & low))


@kernel
def _draw_uniforms(state: np.uint32, first: int, uniforms: Array) -> None:
    """float32 in (0, 1], one for each token from `first` on, from 32 bits of their hashes."""
    for i in range(uniforms.size):
        bits = _finished(_mixed(state, np.uint32(first + i)))
        high, low = np.int32(bits >> np.uint32(16)), np.int32(bits & np.uint32(0xFFFF))
        uniforms[i] = np.float32(high) * np.float32(2**-16) + (
            np.float32(low) + np.float32(0.5)
        ) * np.float32(2**-32)


@kernel
def _largest_with_noise(
    logits: Array, uniforms: Array, bounds: Array
) -> tuple[int, np.floating[Any]]:
    """The first largest of logits + Gumbel noise, and its index.

    The noise of u is at most -log(u), so at most the negative exponent of u times log(2). Only
    tokens that can win by this bound need logarithms.
    """
    bits = uniforms.view(np.int32)
    for i in range(logits.size):
        exponent = np.int32((bits[i] >> 23) - 127)
        bounds[i] = logits[i] + (np.float32(0.001) - np.float32(exponent) * _LN2)
    winner, best = 0, np.float32(-np.inf)
    for i in range(logits.size):
        if bounds[i] > best:
            value = logits[i] + _noise(uniforms[i])
            if value > best:
                winner, best = i, value
    return winner, best


@_inline
def _noise(uniform: np.float32) -> np.float32:
    """-log(-log(1 - u)), with vLLM's series for small u."""
    if uniform < np.float32(0.25):
        total = np.float32(1 / 8)
        total = np.float32(1 / 7) + uniform * total
        total = np.float32(1 / 6) + uniform * total
        total = np.float32(1 / 5) + uniform * total
        total = np.float32(1 / 4) + uniform * total
        total = np.float32(1 / 3) + uniform * total
        total = np.float32(1 / 2) + uniform * total
        total = np.float32(1) + uniform * total
        log_of_rest = -uniform * total
    else:
        log_of_rest = np.log(max(np.float32(1) - uniform, np.float32(2**-24)))
    return -np.log(-log_of_rest)
