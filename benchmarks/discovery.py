"""Memory and CPU time of `discover`, one process per network.

    python benchmarks/discovery.py
    python benchmarks/discovery.py --timm 100   # the first hundred families of timm, if it is there

Prints parameters, their bytes, the peak of memory beyond what the process held before as a multiple
of these, and CPU seconds on one thread. Networks of timm that need more than 60 s of wall time or
6 GB are listed at the end.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SECONDS, GIGABYTES = 60, 6


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
    "GPT-2 shape": (
        lambda: Language(50257, 768, 12, 12, 3072, nn.LayerNorm, False, True), tokens
    ),
    "ViT-B/16": (vision("vit_b_16"), image()),
    "ResNet-18": (vision("resnet18"), image()),
    "ResNet-50": (vision("resnet50"), image()),
    "weight-standardised": (weight_standardised, image(32)),
    "Llama-like": (lambda: Language(32000, 512, 12, 8, 1376, nn.RMSNorm, True, False), tokens),
}  # fmt: skip


def from_timm(name):
    import timm

    model = timm.create_model(name, pretrained=False)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    return model, torch.randn(1, *size)


def families(count):
    """The member with the smallest name of its input and size in each of the first families."""
    import timm

    members = {}
    for name in timm.list_models():
        members.setdefault(timm.models._registry._model_to_module[name], []).append(name)
    return [_smallest(names) for _, names in sorted(members.items())[:count]]


def _smallest(names):
    """The one that sounds smallest: building them all would take an hour."""
    words = (
        "test",
        "atto",
        "pico",
        "femto",
        "nano",
        "micro",
        "tiny",
        "xx",
        "small",
        "xs",
        "_s",
        "18",
        "b0",
        "s0",
    )
    rank = [min((k for k, w in enumerate(words) if w in n), default=len(words)) for n in names]
    return min(zip(rank, names, strict=True))[1]


# ------------------------------------------------------------ one process
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def watch(peak):
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.002)


def measure(name):
    """Print what one network needs, as JSON."""
    from lightning_bnn.symmetry import discover

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name in NETWORKS:
        build, example = NETWORKS[name]
        model, x = build(), example()
    else:
        model, x = from_timm(name)
    discover(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 2))
    before, start, peak = held(), time.process_time(), [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    sym = discover(model, x)
    seconds = time.process_time() - start
    numbers = sum(p.numel() for p in model.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    refuted = sum("numerical check" in f.reason for f in sym.frozen)
    found = (len(sym.permutations), sym.scaling_dof, sym.sign_dof, len(sym.frozen), refuted)
    print(json.dumps([numbers, size, peak[0] - before, seconds, sym.error, found]))


def line(name):
    """One row of the table; why there is none, where a limit was met."""
    command = [sys.executable, __file__, "--only", name]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS + 30, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 15,) * 2),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{name:<34}beyond {SECONDS} s", True
    if run.returncode:
        why = (run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1]
        return f"{name:<34}{why[:90]}", True
    numbers, size, peak, seconds, error, found = json.loads(run.stdout.splitlines()[-1])
    text = f"{name:<34}{numbers / 1e6:>8.1f}{size / 2**20:>8.0f}{peak / 2**20:>8.0f}"
    text += f"{peak / size:>7.1f}{seconds:>7.1f}{error:>9.0e}  " + " ".join(map(str, found))
    return text, seconds > SECONDS or peak > GIGABYTES * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timm", type=int, default=0, help="so many families of timm")
    parser.add_argument("--only", help="one network, measured in this process")
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.only)
    else:
        table(families(arguments.timm) if arguments.timm else list(NETWORKS))


def table(names):
    print(f"{'network':<34}{'million':>8}{'MiB':>8}{'peak':>8}{'ratio':>7}{'CPU s':>7}{'error':>9}"
          "  groups scales signs frozen refuted")  # fmt: skip
    beyond = []
    for name in names:
        text, is_beyond = line(name)
        print(text, flush=True)
        beyond += [name] * is_beyond
    print("beyond the limits:", ", ".join(beyond) or "none")


if __name__ == "__main__":
    main()
