"""Commands on folders of Hugging Face at the size of real checkpoints: CPU time and memory.

python benchmarks/checkpoints.py [--shapes 62M 124M] [--commands symmetries match] [--folder PATH]
    [--record docs/benchmarks/checkpoints.json]

For every shape three folders of random weights are written, one tensor at a time: A; B, which is A
with 5 % noise in another frame; and C, which has nothing to do with A. Every command is a process
of its own. Memory is the most that is anonymous: pages of files do not count. A record keeps the
rows that it has of other shapes and commands, since large ones take long.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
from record import Record, parsed, parser

from weightsym import Element, random_mixings, random_permutations
from weightsym import params as P
from weightsym.commands.networks import (
    symmetries_in,
    transformers_example,
    transformers_network,
)
from weightsym.networks.files.safetensors_format import StoredTensor, write_file
from weightsym.networks.randomness import key_of

GPT2 = {"vocab_size": 50257, "n_positions": 1024}
SHAPES = {
    "5.5M": ("GPT2LMHeadModel", {
        "vocab_size": 8000, "n_positions": 256, "n_layer": 4, "n_embd": 256, "n_head": 4,
    }),
    "62M": ("GPT2LMHeadModel", GPT2 | {"n_layer": 6, "n_embd": 640, "n_head": 10}),
    "124M": ("GPT2LMHeadModel", GPT2 | {"n_layer": 12, "n_embd": 768, "n_head": 12}),
    "355M": ("GPT2LMHeadModel", GPT2 | {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "46M": ("LlamaForCausalLM", {
        "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 32000,
        "tie_word_embeddings": True,
    }),
    "1.2B": ("LlamaForCausalLM", {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
COMMANDS = {
    "symmetries": ["symmetries", "CONFIG"],
    "match": ["match", "B", "A", "--out", "OUT"],
    "match-independent": ["match", "C", "A", "--out", "OUT"],
    "merge": ["merge", "A", "B", "--out", "OUT"],
    "diff": ["diff", "A", "B"],
    "diff-independent": ["diff", "A", "C"],
}
_NOISE, _SHARD = 0.05, 2**30


def main():
    """Write the folders, run the commands, and print one row for each."""
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=["62M", "124M"], choices=SHAPES)
    made.add_argument("--commands", nargs="+", default=[*COMMANDS], choices=COMMANDS)
    made.add_argument("--mixing", action="store_true", help="B is also mixed by matrices")
    made.add_argument("--folder", help="where to write; removed afterwards if it is not given")
    options = parsed(made)
    folder = Path(options.folder or tempfile.mkdtemp())
    record = Record(options)
    if options.record and options.record.is_file():
        new = {(shape, name) for shape in options.shapes for name in options.commands}
        rows = json.loads(options.record.read_text())["rows"]
        record.rows += [row for row in rows if (row["shape"], row["command"]) not in new]
    try:
        for shape in options.shapes:
            count = written(shape, folder / shape, options)
            for name in options.commands:
                code, seconds, peak = measured(COMMANDS[name], folder / shape, options.mixing)
                labels = {"shape": shape, "parameters": count, "command": name, "exit": code}
                record.value("CPU s", seconds, **labels)
                record.value("anonymous MB", peak / 1e6, **labels)
                record.write()
    finally:
        if not options.folder:
            shutil.rmtree(folder)


# ------------------------------------------------------------ folders
def written(shape, folder, options):
    """Write what is not there yet, and return the number of parameters."""
    import transformers

    (folder / "CONFIG").mkdir(parents=True, exist_ok=True)
    name, settings = SHAPES[shape]
    config = getattr(transformers, name).config_class(**settings)
    content = {**config.to_dict(), "architectures": [name]}
    (folder / "CONFIG" / "config.json").write_text(json.dumps(content))
    network = transformers_network(folder / "CONFIG")
    tensors, dtype = P.of(network), torch.bfloat16 if "Llama" in name else torch.float32
    weights = partial(random_tensor, tensors, 0)
    needed = {x for command in options.commands for x in COMMANDS[command]}
    makers = {"A": lambda: weights, "C": lambda: partial(random_tensor, tensors, 1)}
    makers["B"] = lambda: partial(moved(network, options.mixing).of, read=noisy(weights))
    for which in sorted(needed & makers.keys()):
        if not (folder / which).exists():
            write_shards(folder / which, content, tensors, makers[which](), dtype)
    return sum(t.numel() for t in tensors.values())


def random_tensor(tensors, seed, name):
    """Random numbers of the size that networks begin with."""
    t = tensors[name]
    generator = torch.Generator().manual_seed(key_of(f"{name} {seed}"))
    noise = torch.randn(t.shape, generator=generator)
    is_gain = t.ndim == 1 and name.endswith("weight")
    return noise.mul_(0.1).add_(1.0) if is_gain else noise.mul_(0.02)


def noisy(read):
    """The same with noise on every tensor."""

    def other(name):
        t = read(name)
        generator = torch.Generator().manual_seed(key_of(f"{name} noise"))
        noise = torch.randn(t.shape, generator=generator).mul_(_NOISE * t.std(correction=0))
        return noise.add_(t)

    return other


def moved(network, mixing):
    """A random element of the group: permutations, and matrices that mix channels."""
    sym = symmetries_in(network, *transformers_example(network, ""))
    generator = torch.Generator().manual_seed(3)
    permutations = random_permutations(sym, generator)
    matrices = random_mixings(sym, generator) if mixing else None
    return Element.of_groups(sym, permutations=permutations, matrices=matrices)


def write_shards(folder, config, tensors, read, dtype):
    """Write a folder as transformers does, one tensor in memory at a time."""
    shards, size = [[]], 0
    for name, t in tensors.items():
        if size + t.numel() * dtype.itemsize > _SHARD and shards[-1]:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += t.numel() * dtype.itemsize
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    table = {}
    for k, names in enumerate(shards, 1):
        one = len(shards) == 1
        file = "model.safetensors" if one else f"model-{k:05}-of-{len(shards):05}.safetensors"
        stored = {
            n: StoredTensor(dtype, tensors[n].shape, lambda n=n: read(n).to(dtype).contiguous())
            for n in names
        }
        write_file(folder / file, stored, {"format": "pt"})
        table |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": table}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------ processes
def measured(command, folder, mixing):
    """The exit code of a command, its CPU seconds, and the most anonymous bytes that it held."""
    places = {which: str(folder / which) for which in ("A", "B", "C", "CONFIG", "OUT")}
    words = [places.get(word, word) for word in command]
    if mixing and command[0] in ("match", "merge"):
        words += ["--method", "mixing"]
    shutil.rmtree(folder / "OUT", ignore_errors=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsym.cli", *words], stdout=subprocess.DEVNULL
    )
    peak, ended = [0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, peak, ended))
    watch.start()
    _, status, usage = os.wait4(process.pid, 0)
    ended.set()
    watch.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(folder / "OUT", ignore_errors=True)
    return process.returncode, usage.ru_utime + usage.ru_stime, peak[0]


def _watch(pid, peak, ended):
    while not ended.is_set():
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        peak[0] = max([peak[0], *(1024 * int(row.split()[1]) for row in text.splitlines()
                                  if row.startswith("RssAnon"))])  # fmt: skip
        time.sleep(0.02)


if __name__ == "__main__":
    main()
