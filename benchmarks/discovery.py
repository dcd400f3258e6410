"""Memory and CPU time of `discover`, one process per network.

    python benchmarks/discovery.py
    python benchmarks/discovery.py --timm 100   # the first hundred families of timm, if it is there
    python benchmarks/discovery.py --timm 100 --results walk.json   # resumes where it stopped

Prints parameters, their bytes, the peak of memory beyond what the process held before as a multiple
of these, and CPU seconds on one thread. Networks of timm that need more than 60 of these or 6 GB
are listed at the end.
"""

import contextlib
import json
import logging
import multiprocessing
import re
import resource
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from record import Record, parsed, parser
from torch import nn

from lightning_bnn.symmetry import discover

SECONDS, GIGABYTES = 60, 6
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


def from_timm(name):
    """A network and an image of its size; a small one where that would be large and need not be."""
    import timm

    model = timm.create_model(name, pretrained=False)
    size = model.default_cfg.get("input_size", (3, 224, 224))
    if size[-1] > 256:
        with contextlib.suppress(Exception):  # it may take no other size
            model, size = timm.create_model(name, pretrained=False, img_size=224), (3, 224, 224)
    return model, torch.randn(1, *size)


def families(count):
    """The smallest member of each of the first families, as far as a look at a few can tell."""
    import timm

    modules = timm.list_modules()[:count]
    return [_smallest(timm.list_models(module=m)) for m in modules if timm.list_models(module=m)]


SMALL = "test_ atto pico femto nano micro xxs xxt tiny small _s _xs _m0 _t0 _t8 18 14 b0 s0".split()


def _smallest(names):
    """The fewest parameters among a few short names that promise few, patches left aside."""
    import timm

    promising = {n: any(s in re.sub(r"patch\d+", "", n) for s in SMALL) for n in names}
    ranked = sorted(names, key=lambda n: (not promising[n], len(n), n))[:3]
    sizes = {}
    for name in ranked:
        with torch.device("meta"):
            try:
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            except Exception:  # noqa: BLE001  (some do not build without memory)
                sizes[name] = 10**9
    return min(sizes, key=sizes.__getitem__)


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
    """What one network needs, and what is found in it."""
    torch.manual_seed(0)
    if name in NETWORKS:
        build, example = NETWORKS[name]
        model, x = build(), example()
    else:
        model, x = from_timm(name)
    before, start, peak = held(), time.process_time(), [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    sym = discover(model, x)
    seconds = time.process_time() - start
    numbers = sum(p.numel() for p in model.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    refuted = sum("numerical check" in f.reason for f in sym.frozen)
    found = (len(sym.permutations), sym.scaling_dof, sym.sign_dof, len(sym.frozen), refuted)
    return [numbers, size, peak[0] - before, seconds, sym.error, found]


def _report_to(pipe, name):
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 15,) * 2)  # of this process alone
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        pipe.send(measure(name))
    except BaseException as error:  # noqa: BLE001  (whatever happens is a result)
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


def in_a_process(name):
    """The same in a process that has imported everything; a sentence where there is no result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report_to, args=(theirs, name))
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(20 * SECONDS) else "it hangs"
    except EOFError:
        result = f"beyond {SECONDS} s, or killed for its memory"
    process.kill()
    process.join()
    return result


def described(name, result):
    """One row of the table; why there is none, where a limit was met."""
    if isinstance(result, str):
        return f"{name:<34}{result[:90]}"
    numbers, size, peak, seconds, error, found = result
    text = f"{name:<34}{numbers / 1e6:>8.1f}{size / 2**20:>8.0f}{peak / 2**20:>8.0f}"
    return f"{text}{peak / size:>7.1f}{seconds:>7.1f}{error:>9.0e}  " + " ".join(map(str, found))


def is_beyond(result):
    """Whether a limit was met."""
    return isinstance(result, str) or result[3] > SECONDS or result[2] > GIGABYTES * 1e9


def main():
    made = parser(__doc__, repeats=1)
    made.add_argument("--timm", type=int, default=0, help="so many families of timm")
    made.add_argument("--only", help="one network")
    made.add_argument("--results", type=Path, default=Path("/dev/null"), help="resumes from it")
    options = parsed(made)
    discover(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), torch.ones(4, 2))
    file = options.results
    known = json.loads((file.read_text() if file.exists() else "") or "{}")
    if options.only:
        names = [options.only]
    elif options.timm:
        names = known["families"] = known.get("families") or families(options.timm)
    else:
        names = list(NETWORKS)
    table(names, known, file)
    record = Record(options)
    for name in names:
        if not isinstance(known[name], str):
            for who, value in zip(MEASURED, known[name], strict=False):
                record.value(who, value, network=name)
    record.write()


def table(names, known, file):
    print(f"{'network':<34}{'million':>8}{'MiB':>8}{'peak':>8}{'ratio':>7}{'CPU s':>7}{'error':>9}"
          "  groups scales signs frozen refuted")  # fmt: skip
    for name in names:
        if name not in known:
            known[name] = in_a_process(name)
            file.write_text(json.dumps(known, indent=1))
        print(described(name, known[name]), flush=True)
    print("beyond the limits:", ", ".join(n for n in names if is_beyond(known[n])) or "none")


if __name__ == "__main__":
    main()
