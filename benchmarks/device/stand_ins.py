"""Puts the simulated device between vLLM's CPU workers and the model.

vLLM's CPU platform has streams and events that do nothing. They are replaced by the simulated
device's, and the model's forward pass by one that the device runs for a given time. Nothing here
knows of drafts.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.device.device import Event, SimulatedDevice, Stream
from benchmarks.device.host_work import HostWork
from benchmarks.device.text import VOCABULARY, Text, TextOnDevice

LOAD_FORMAT = "simulated"
HIDDEN_SIZE = 64


def install(device: SimulatedDevice) -> None:
    """Let the workers of this process use the device. Call it before an engine is made."""
    import torch
    import vllm.v1.worker.cpu_worker  # noqa: F401  it installs the events that do nothing

    import lookahead_vllm.engine.drafter.drafter  # noqa: F401  without it, numba breaks vLLM's start

    class DeviceEvent(Event):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(device)

    class DeviceStream(Stream):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(device)

    def set_stream(stream: Stream) -> None:
        device.current = stream

    copy_to_host = torch.Tensor.cpu

    def cpu(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor whose code moves it to the host is the device's; this waits for it."""
        device.current.synchronize()
        return copy_to_host(tensor, *args, **kwargs)

    torch.Event = torch.cuda.Event = DeviceEvent
    torch.cuda.Stream = DeviceStream
    torch.cuda.set_stream = set_stream
    torch.cuda.current_stream = lambda *_, **__: device.current
    torch.cuda.stream = lambda stream, **__: stream
    torch.cuda.synchronize = torch.accelerator.synchronize = device.synchronize
    torch.Tensor.cpu = cpu
    _install_copies(device)
    _attend_as_on_a_gpu()


def _install_copies(device: SimulatedDevice) -> None:
    """Sampled tokens reach the host when the device does."""
    from vllm.v1.worker.gpu import async_utils
    from vllm.v1.worker.gpu.spec_decode import utils

    def async_copy_to_np(tensor: Any) -> Any:
        return device.copy_to_host(tensor.numpy())

    async_utils.async_copy_to_np = utils.async_copy_to_np = async_copy_to_np


def _attend_as_on_a_gpu() -> None:
    """There, chains are vLLM's kernel's, which reads on the device where they are."""
    from lookahead_vllm.engine.attention.cpu import CPUTreeAttention

    CPUTreeAttention.replaces_chains = False


def register_model(
    device: SimulatedDevice,
    work: HostWork,
    text: Text,
    seconds_of: Callable[[int], float],
    drafter_share: float,
) -> None:
    """Make the load format "simulated": a model whose forward pass the device runs.

    `seconds_of` is the device's time for a forward pass over a number of tokens. A second model,
    the drafter, writes the same text, except that every fourth token is wrong; `drafter_share` is
    its time, as a share of the model's for a single token. `work` gets the time that both take
    here.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    rule = TextOnDevice(text)

    def states(tokens: Any) -> Any:
        """Hidden states whose first number is the next token."""
        hidden = torch.zeros(len(tokens), HIDDEN_SIZE)
        hidden[:, 0] = tokens
        return hidden

    def forward(input_ids: Any, positions: Any, *_: Any, **__: Any) -> Any:
        device.launch(seconds_of(len(input_ids)), len(input_ids))
        return states(rule.next_tokens(input_ids, positions))

    def forward_of_drafter(input_ids: Any, positions: Any, *_: Any, **__: Any) -> Any:
        device.launch(drafter_share * seconds_of(1))
        tokens = rule.next_tokens(input_ids, positions)
        return states((tokens + ((input_ids + positions) % 4 == 0)) % VOCABULARY)

    forwards = iter((work.kernel(forward, 0), work.kernel(forward_of_drafter, 0)))

    def compute_logits(hidden: Any, *_: Any, **__: Any) -> Any:
        logits = torch.zeros(len(hidden), VOCABULARY)
        return logits.scatter_(1, hidden[:, :1].long(), 1.0)

    @register_model_loader(LOAD_FORMAT)
    class SimulatedModelLoader(DummyModelLoader):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            model.forward = next(forwards)
            model.compute_logits = work.kernel(compute_logits)
            return model
