"""Texts as a server with the same model renders them: by vLLM's own code, without an engine."""

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from vllm.config import DeviceConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from lookahead_vllm.cli.arguments import first_line

RENDERED = ("tools", "documents", "reasoning_effort", "chat_template_kwargs")
"""What a chat template gets of a request besides its messages."""


class ServerRenderer:
    """The tokenizer and the chat template of a model; a `Renderer` of `draft/cache/warming.py`.

    Raises
    ------
    ValueError, OSError
        vLLM finds no such model, or cannot read its configuration or its tokenizer.
    """

    def __init__(self, model: str) -> None:
        # Images come from `data:` URLs alone: building a cache fetches nothing that a text names.
        config = EngineArgs(model=model, allowed_media_domains=["none"]).create_model_config()
        # As `vllm launch render`: nothing is computed, so neither kernels nor a device are needed.
        config.quantization = None
        renderer = renderer_from_config(
            VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"))
        )
        self.model_config = config
        self.tokenizer = renderer.get_tokenizer()
        # A document may be longer than the model's context, of which transformers would warn.
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
        self._renderer = OnlineRenderer(
            config,
            renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )

    def text(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def chat(
        self, chat: Mapping[str, Any], messages: Sequence[Any], add_generation_prompt: bool
    ) -> list[int]:
        messages = copy.deepcopy(messages)
        for message in messages:
            if message.get("reasoning") is None:  # it may have the older name, as in a request
                message["reasoning"] = message.get("reasoning_content")
        try:
            # The request has no messages: its types would order a tool call's arguments before its
            # name, as no model writes them.
            request = ChatCompletionRequest(
                **{key: chat[key] for key in RENDERED if chat.get(key)},
                messages=[],
                add_generation_prompt=add_generation_prompt,
            )
            _, (prompt,) = asyncio.run(
                self._renderer.preprocess_chat(
                    request,
                    messages,
                    default_template=None,
                    default_template_content_format="auto",
                    default_template_kwargs=None,
                    tool_dicts=[tool.model_dump() for tool in request.tools or []] or None,
                )
            )
        except Exception as error:
            raise ValueError(f"vLLM refuses the chat: {first_fault(error)}") from None
        return list(prompt["prompt_token_ids"])


def first_fault(error: Exception) -> str:
    """What an error of vLLM says, as one line; of a ValidationError its first fault."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".splitlines()[0].lstrip(": ")
    return first_line(error)
