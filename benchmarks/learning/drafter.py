"""Train a small EAGLE head on a model's own answers.

Source: EAGLE (Li et al., 2024), section 4: one decoder layer reads the model's last hidden state at
a token and the embedding of the next token, and predicts the hidden state there. The model's own
output layer turns it into tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from lookahead_vllm.cli.arguments import escape_unprintable
from lookahead_vllm.draft.progress import NUM_ALTERNATIVES
from lookahead_vllm.draft.trie.recycling import GAPS
from lookahead_vllm.simulation.traces import Trace, TraceError, load_traces

WINDOW = 256
"""Tokens of a text that are trained on at once; the head sees nothing before them."""
BATCH = 8
"""Windows of a step."""
SKIPPED = 4
"""The first tokens of a window, which the head knows too little about."""
NOISE = 0.1
"""Uniform noise on the hidden states, because in a chain the head reads its own predictions."""
LEARNING_RATE = 2e-3
INPUT_SCALE = 0.7
"""The standard deviation of each part of the layer's input at first."""
STATE_WEIGHT = 0.2
"""Of the distance to the model's hidden states in the loss; the tokens' weight is 1."""

DESCRIPTION = """\
Train an EAGLE head for a Llama-like model on recorded answers of that model.

Every second line of the traces is left out and written to OUT/held_out.jsonl, to measure on.
"""
EPILOG = """\
example:
  python scripts/train_drafter.py --model .cache/models/SmolLM2-135M-Instruct \\
      --traces spec_bench.jsonl humaneval.jsonl --out head
  python scripts/bench.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts head/held_out.jsonl --dtype float32 --methods none --config \\
      'both={"method": "lookahead", "drafter": {"method": "eagle", "model": "head"}}'
"""


class Window(NamedTuple):
    """A stretch of a text."""

    ids: Tensor
    """int64 [t]"""
    states: Tensor
    """float16 [t, hidden]: the model's last hidden state at each token."""


class Head(torch.nn.Module):
    """The head, with the names that vLLM reads.

    Parameters
    ----------
    model
        A Llama-like model of transformers.
    state_scale : float
        The standard deviation of its last hidden states. Embeddings are much smaller, and would
        hardly be read at first if both had the same weights.
    """

    def __init__(self, model: torch.nn.Module, state_scale: float) -> None:
        super().__init__()
        base = model.model
        hidden = model.config.hidden_size
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        embeddings, states = self.fc.weight.data.split(hidden, 1)
        embeddings.normal_(0, INPUT_SCALE / float(base.embed_tokens.weight.std()) / hidden**0.5)
        states.normal_(0, INPUT_SCALE / state_scale / hidden**0.5)
        layer = type(base.layers[-1])(model.config, 0)
        for weight in layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=model.config.initializer_range)
        layer.input_layernorm = torch.nn.Identity()  # as in EAGLE, and in vLLM
        self.layers = torch.nn.ModuleList([layer])
        self._rotary = [base.rotary_emb]  # in a list: no weights of the head

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """The predicted states at the embedded tokens, [b, t, hidden].

        `embeddings` and `states`, each [b, t, hidden], are those of a token and of the one before.
        """
        x = self.fc(torch.cat((embeddings, states), -1))
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out: Tensor = self.layers[0](x, position_embeddings=self._rotary[0](x, positions))
        return out

    def at(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The layer's outputs for the inputs x [n, hidden], with an additive mask [1, 1, n, n]."""
        rotary = self._rotary[0](x[None], positions[None])
        out: Tensor = self.layers[0](x[None], attention_mask=mask, position_embeddings=rotary)
        return out[0]


def main(arguments: Sequence[str]) -> int:
    """The command."""
    escape_unprintable()
    options = _parser().parse_args(arguments)
    try:
        traces = [trace for path in options.traces for trace in load_traces(path).traces]
    except TraceError as error:
        print(f"train_drafter: {error}", file=sys.stderr)
        return 2
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hf.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.to(device).eval().requires_grad_(False)
    options.out.mkdir(parents=True, exist_ok=True)
    texts = [[*trace.prompt.tolist(), *trace.output.tolist()] for trace in traces[::2]]
    windows = list(_windows(model, texts, options.tokens))
    scale = float(torch.cat([window.states for window in windows]).float().std())
    head = Head(model, scale).to(device)
    agreement = train(head, model, windows, options.epochs)
    write_held_out(options.out / "held_out.jsonl", traces[1::2], head, model, options.chains)
    save_file(head.state_dict(), options.out / "model.safetensors")
    config = model.config.to_dict() | {"num_hidden_layers": 1}
    (options.out / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{options.out}: the model's likeliest token is the head's in {agreement:.1%}")
    return 0


def write_held_out(
    path: Path, traces: Sequence[Trace], head: Head, model: torch.nn.Module, length: int | None
) -> None:
    """Write traces, with chains of this length if it is given."""
    with path.open("w", encoding="utf-8") as file:
        for trace in tqdm(traces, unit="texts", desc=path.name):
            prompt, output = trace.prompt.tolist(), trace.output.tolist()
            line: dict[str, Any] = {"category": trace.category, "prompt_token_ids": prompt}
            line["output_token_ids"] = output
            if length:
                ids = torch.tensor([*prompt, *output], device=head.fc.weight.device)
                line["chains"] = chains_of(head, model, ids, length)[len(prompt) - 1 :].tolist()
            file.write(json.dumps(line) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the model that gave the answers")
    add("--traces", nargs="+", type=Path, required=True, help="as for `lookahead-vllm simulate`")
    add("--out", type=Path, required=True, metavar="DIR", help="for the head")
    add("--tokens", type=int, default=100_000, help="train on at most so many (default: 100000)")
    add("--epochs", type=int, default=6, help="how often each token is seen (default: 6)")
    add("--chains", type=int, metavar="K", help="write K proposals after each held-out token")
    add("--seed", type=int, default=0, help="of the weights and of the order (default: 0)")
    return parser


@torch.no_grad()
def _windows(model: torch.nn.Module, texts: Sequence[list[int]], tokens: int) -> Iterator[Window]:
    """The texts in windows with the model's states, until there are so many tokens."""
    device = next(model.parameters()).device
    with tqdm(total=min(tokens, sum(map(len, texts))), unit="tokens", desc="states") as bar:
        for text in texts:
            if bar.n >= tokens:
                return
            ids = torch.tensor(text, device=device)
            states = model.model(input_ids=ids[None]).last_hidden_state[0].half()
            for first in range(0, len(ids), WINDOW):
                if len(ids) - first > 2 * SKIPPED:
                    yield Window(ids[first:][:WINDOW], states[first:][:WINDOW])
            bar.update(len(ids))


@torch.no_grad()
def chains_of(head: Head, model: torch.nn.Module, ids: Tensor, length: int) -> Tensor:
    """What the head proposes after each token of a text but the first one.

    Returns
    -------
    int32 [t - 1, length, NUM_ALTERNATIVES, 2]
        As `EmittedTokens.chains`; `ids` int64 [t].
    """
    embed, output = model.get_input_embeddings(), model.get_output_embeddings().weight
    states = model.model(input_ids=ids[None]).last_hidden_state[0]
    t, places = len(ids) - 1, torch.arange(len(ids) - 1)
    tokens, before = ids[1:], states[:-1]
    inputs, chains = [], []
    for depth in range(length):
        inputs.append(head.fc(torch.cat((embed(tokens), before), -1)))
        # A row sees the text up to its place, and the rows of its own chain.
        sees = torch.eye(t, dtype=torch.bool).repeat(depth + 1, depth + 1)
        depths = torch.arange((depth + 1) * t) // t
        sees &= depths[None] <= depths[:, None]
        sees[:, :t] = (places[None] <= places[:, None]).repeat(depth + 1, 1)
        mask = torch.zeros(1, 1, *sees.shape).masked_fill(~sees, -torch.inf)
        positions = torch.cat([places + deeper for deeper in range(depth + 1)])
        before = head.at(torch.cat(inputs), positions, mask)[-t:]
        best, chosen = (before @ output.T).topk(NUM_ALTERNATIVES)
        gaps = best[:, :1] - best
        gaps[:, 0] = gaps[:, 1]
        classes = torch.bucketize(gaps, torch.tensor(GAPS), right=True)
        chains.append(torch.stack((chosen, classes), -1))
        tokens = chosen[:, 0]
    return torch.stack(chains, 1).int()


def train(head: Head, model: torch.nn.Module, windows: Sequence[Window], epochs: int) -> float:
    """Train the head; returns the share of tokens of the last epoch at which both agree.

    Only tokens that occur in the windows are told apart, to save time: the model's vocabulary is
    much larger.
    """
    embed = model.get_input_embeddings()
    vocabulary = torch.cat([window.ids for window in windows]).unique()
    output = model.get_output_embeddings().weight[vocabulary]
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    steps = epochs * math.ceil(len(windows) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    agreed = torch.zeros(2)
    with tqdm(total=steps, unit="steps", desc="training") as bar:
        for _ in range(epochs):
            agreed.zero_()
            for some in torch.randperm(len(windows)).split(BATCH):
                batch = [windows[i] for i in some.tolist()]
                loss, counts = _loss(head, embed, output, batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                agreed += counts
                bar.update()
                bar.set_postfix(agreement=f"{agreed[0] / agreed[1]:.1%}")
    return float(agreed[0] / agreed[1])


def _loss(
    head: Head, embed: torch.nn.Module, output: Tensor, batch: Sequence[Window]
) -> tuple[Tensor, Tensor]:
    """The loss of some windows; how often head and model agree, and the number of tokens."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([window.ids for window in batch], batch_first=True)
    states = pad([window.states.float() for window in batch], batch_first=True)
    lengths = torch.tensor([len(window.ids) for window in batch], device=ids.device)
    places = torch.arange(1, ids.shape[1], device=ids.device)
    counted = (places[None] < lengths[:, None]) & (places >= SKIPPED)
    noise = NOISE * (2 * torch.rand_like(states[:, :-1]) - 1)
    predicted = head(embed(ids[:, 1:]), states[:, :-1] + noise)[counted]
    wanted = states[:, 1:][counted]
    logits, targets = predicted @ output.T, wanted @ output.T
    loss = F.cross_entropy(logits, targets.softmax(-1))
    loss = loss + STATE_WEIGHT * F.smooth_l1_loss(predicted, wanted)
    agree = (logits.argmax(-1) == targets.argmax(-1)).sum()
    return loss, torch.tensor([float(agree), float(counted.sum())])
