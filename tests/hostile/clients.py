"""Clients of a server, in one thread and over plain sockets, so that they need little CPU."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from tests.hostile.bad_requests import TOOLS, tool_messages

TIMEOUT_SECONDS = 300.0
"""A server hangs if it does not answer within this time."""


class Reply(NamedTuple):
    """A server's response; the status is 0 if it closed the connection without one."""

    status: int
    body: bytes
    seconds: float


def http_message(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def connected(
    port: int, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = receive_buffer or 2**20
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    except BaseException:
        sock.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(port: int, path: str, body: bytes) -> Reply:
    """Send a request and read the whole response."""
    start = time.perf_counter()
    answer = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(TIMEOUT_SECONDS), connected(port) as (reader, writer):
            writer.write(http_message(path, body))
            # A server may answer before it has read the body, and then reset the connection.
            while part := await reader.read(2**16):
                answer += part
    head, _, content = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0
    if b"transfer-encoding: chunked" in head.lower():
        content = b"".join(_chunks(content))
    return Reply(status, content, time.perf_counter() - start)


def _chunks(content: bytes) -> list[bytes]:
    chunks = []
    while content:
        size, _, rest = content.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        content = rest[length + 2 :]
    return chunks


async def read_head(reader: asyncio.StreamReader) -> int:
    """Read the response's head, and return the status."""
    line = await reader.readline()
    while (await reader.readline()).strip():
        pass
    return int(line.split(b" ", 2)[1])


# ---- the good client -----------------------------------------------------------------------------


def good_request(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Draw a request with a reproducible answer: greedy, or sampled with a seed."""
    sampling: dict[str, Any] = {"temperature": 0}
    if rng.random() < 0.5:
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**31)}
    if rng.random() < 0.3:  # plain vLLM ignores it
        reference = rng.choices(range(5, 128), k=64)
        sampling["vllm_xargs"] = {"lookahead_reference": reference, "lookahead_namespace": "n"}
    return {
        "model": "m",
        "prompt": rng.choices(range(5, 128), k=rng.randint(8, 32)),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **sampling,
    }


def good_chat(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Draw a reproducible request of an agent, with tools and the results of calls."""
    texts = ["".join(rng.choices('ab1: \n"{', k=rng.randint(0, 40))) for _ in range(3)]
    request = good_request(rng, max_tokens)
    del request["prompt"], request["return_token_ids"]
    if "vllm_xargs" not in request:  # which has a reference
        request["prediction"] = {"type": "content", "content": texts[0]}
    return {
        **request,
        "messages": tool_messages([{"type": "text", "text": text} for text in texts]),
        "tools": TOOLS,
        "tool_choice": rng.choice(["auto", "required"]),
        "ignore_eos": False,
    }


async def stream(port: int, request: dict[str, Any]) -> list[Any]:
    """Send a good request; RuntimeError unless it gets all its tokens.

    A chat's answer is the text of its fields.
    """
    tokens: list[int] = []
    is_chat, fields = "messages" in request, defaultdict[str, str](str)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    async with asyncio.timeout(TIMEOUT_SECONDS), connected(port) as (reader, writer):
        writer.write(http_message(path, json.dumps(request).encode()))
        status = await read_head(reader)
        if status != 200:
            raise RuntimeError(f"a good request was answered with {status}")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"a good request failed: {line[:300]!r}")
            (choice,) = chunk["choices"]
            if not is_chat:
                tokens += choice["token_ids"] or ()
                continue
            fields["finish"] += choice["finish_reason"] or ""
            fields["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                for name, text in call["function"].items():
                    fields[f"{call['index']} {name}"] += text or ""
    if is_chat:
        if not fields["finish"]:
            raise RuntimeError("a good chat was answered without an end")
        return sorted(fields.items())
    if len(tokens) != request["max_tokens"]:
        raise RuntimeError(f"a good request was answered with {len(tokens)} tokens")
    return tokens


# ---- hostile clients -----------------------------------------------------------------------------


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def long_stream(rng: random.Random, **fields: Any) -> bytes:
    request = {
        "model": "m",
        "prompt": rng.choices(range(5, 128), k=12),
        "max_tokens": 64,
        "ignore_eos": True,
        "stream": True,
        "seed": rng.randrange(2**31),
        "vllm_xargs": {"lookahead_reference": rng.choices(range(5, 128), k=64)},
    }
    return http_message("/v1/completions", json.dumps({**request, **fields}).encode())


def long_chat(rng: random.Random) -> bytes:
    """A stream that a parser reads."""
    return http_message("/v1/chat/completions", json.dumps(good_chat(rng, 64)).encode())


Act = Callable[[int, bytes, random.Random], Awaitable[None]]


async def cut_before_a_request(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (_, writer):
        if rng.random() < 0.5:
            reset(writer)


async def cut_in_its_headers(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (_, writer):
        writer.write(message[: rng.randrange(1, message.index(b"\r\n\r\n"))])
        await asyncio.sleep(0.05)


async def cut_in_its_body(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (_, writer):
        writer.write(message[: rng.randrange(message.index(b"\r\n\r\n") + 4, len(message))])
        await asyncio.sleep(0.05)


async def cut_before_the_answer(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (_, writer):
        writer.write(message)
        await asyncio.sleep(rng.uniform(0, 0.02))
        if rng.random() < 0.5:
            reset(writer)


async def cut_in_the_answers_headers(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (reader, writer):
        writer.write(message)
        await reader.read(rng.randrange(1, 40))
        reset(writer)


async def cut_in_the_stream(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port) as (reader, writer):
        writer.write(message)
        for _ in range(rng.randrange(6, 30)):
            if not await reader.readline():
                break
        if rng.random() < 0.5:
            reset(writer)


async def read_slowly(port: int, message: bytes, rng: random.Random) -> None:
    async with connected(port, receive_buffer=2048) as (reader, writer):
        writer.write(message)
        for _ in range(80):
            await asyncio.sleep(0.05)
            if not await reader.read(64):
                break


CUTS: dict[str, Act] = {
    act.__name__.replace("_", " "): act
    for act in (
        cut_before_a_request,
        cut_in_its_headers,
        cut_in_its_body,
        cut_before_the_answer,
        cut_in_the_answers_headers,
        cut_in_the_stream,
    )
}


async def perform(port: int, act: Act, message: bytes, rng: random.Random) -> None:
    """Perform the act; the server may end the connection."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await act(port, message, rng)
