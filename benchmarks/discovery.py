"""Memory and CPU time of `discover`, one process per network.

    python benchmarks/discovery.py [--only NAME]

Prints parameters, their bytes, the peak of memory beyond what the process held before, and CPU
seconds on one thread.
"""

import logging
import multiprocessing
import resource
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from record import Record, parsed, parser
from torch import nn

from weightsym import discover

MEASURED = ("parameters", "bytes", "peak", "seconds", "error")


# ------------------------------------------------------------ networks
class Block(nn.Module):
    """Causal attention and an MLP before which the stream is normalised."""

    def __init__(self, width, heads, hidden, norm, gated):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([norm(width), norm(width)])
        bias = not gated
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.gate = nn.Linear(width, hidden, False) if gated else None

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        y = F.gelu(self.up(y)) if self.gate is None else self.up(y) * F.silu(self.gate(y))
        return x + self.down(y)


class Language(nn.Module):
    """A stack of blocks between an embedding and a last layer, which may be tied to it."""

    def __init__(self, words, width, depth, heads, hidden, norm, gated, tied):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = None if gated else nn.Embedding(1024, width)
        blocks = (Block(width, heads, hidden, norm, gated) for _ in range(depth))
        self.blocks, self.norm = nn.Sequential(*blocks), norm(width)
        self.last = nn.Linear(width, words, bias=False)
        if tied:
            self.last.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.last(self.norm(self.blocks(x)))


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1."""

    def forward(self, x):
        w = self.weight
        variance, mean = torch.var_mean(w, (1, 2, 3), correction=0, keepdim=True)
        return self._conv_forward(x, (w - mean) * torch.rsqrt(variance + 1e-5), self.bias)


def weight_standardised(width=256, depth=8):
    layers = []
    for k in range(depth):
        layers += [Standardised(width if k else 3, width, 3, padding=1), nn.GroupNorm(8, width)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def vision(name):
    import torchvision

    return lambda: getattr(torchvision.models, name)(weights=None)


def tokens():
    return torch.randint(1000, (1, 16))


def image(size=224):
    return lambda: torch.randn(1, 3, size, size)


NETWORKS = {
    "GPT-2 shape, 16 tokens": (
        lambda: Language(50257, 768, 12, 12, 3072, nn.LayerNorm, False, True), tokens
    ),
    "ViT-B/16 at 224 px": (vision("vit_b_16"), image()),
    "ResNet-18 at 224 px": (vision("resnet18"), image()),
    "ResNet-50 at 224 px": (vision("resnet50"), image()),
    "weight-standardised convolutions": (weight_standardised, image(32)),
    "Llama-like, 16 tokens": (
        lambda: Language(32000, 512, 12, 8, 1376, nn.RMSNorm, True, False), tokens
    ),
}  # fmt: skip


# ------------------------------------------------------------ one process
def held():
    """Bytes in memory, without files, which a process that was forked reads again."""
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(of_files)) * resource.getpagesize()


def watch(peak):
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.002)


def measure(name):
    """Parameters, their bytes, the peak of memory, CPU seconds, and the error of the symmetries."""
    torch.manual_seed(0)
    build, example = NETWORKS[name]
    model, x = build(), example()
    before, start, peak = held(), time.process_time(), [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    sym = discover(model, x)
    seconds = time.process_time() - start
    numbers = sum(p.numel() for p in model.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return [numbers, size, peak[0] - before, seconds, sym.error]


def report(pipe, name):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pipe.send(measure(name))


def in_a_process(name):
    """The same in a process of its own that has imported everything."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(theirs, name))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def main():
    made = parser(__doc__, repeats=1)
    made.add_argument("--only", choices=NETWORKS, help="one network")
    options = parsed(made)
    discover(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), torch.ones(4, 2))
    record = Record(options)
    for name in [options.only] if options.only else NETWORKS:
        for who, value in zip(MEASURED, in_a_process(name), strict=True):
            record.value(who, value, network=name)
    record.write()


if __name__ == "__main__":
    main()
