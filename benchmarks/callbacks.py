"""What callbacks cost a step, Kendall's tau against scipy, the bank against torch.save.

python benchmarks/callbacks.py steps      ResNet-18, batch 128 of 32 x 32, bare and watched
python benchmarks/callbacks.py tau        all groups of ResNet-18
python benchmarks/callbacks.py bank       11 million weights: write, read, one layer of all
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from scipy.stats import kendalltau
from torch.nn.functional import cross_entropy

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau
from lightning_bnn.symmetry import UnitOrders, discover, order_change, ranks

warnings.filterwarnings("ignore")


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------ steps
class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.resnet18(10)

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, nesterov=True)


class Timed(L.Callback):
    """Seconds of every step, and of what a callback does in it."""

    def __init__(self, device):
        self.device, self.steps, self.start = device, [], 0.0

    def on_train_batch_start(self, *_):
        synchronise(self.device)
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_):
        synchronise(self.device)
        self.steps.append(time.perf_counter() - self.start)


def watched(callback, device):
    """The same callback, whose time at the end of batches is kept."""
    seconds, own = [], callback.on_train_batch_end

    def timed(*args):
        synchronise(device)
        start = time.perf_counter()
        own(*args)
        synchronise(device)
        seconds.append(time.perf_counter() - start)

    callback.on_train_batch_end = timed
    return callback, seconds


def steps(options):
    data = torch.utils.data.TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(10, (128,)))
    loader = torch.utils.data.DataLoader(data, 128)
    every = options.steps
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "PermutationTau, every step": (PermutationTau(), 1),
            "MassGap, every 50 steps": (MassGap(5), 50),
            "CheckpointHarvester, every 10 steps": (
                CheckpointHarvester(folder, every_n_steps=5),
                10,
            ),
        }
        timed, seconds, callbacks = Timed(options.device), {}, []
        for name, (callback, _) in contestants.items():
            callback, seconds[name] = watched(callback, options.device)
            callbacks.append(callback)
        trainer = L.Trainer(
            max_epochs=every,
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            callbacks=[timed, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=50,
        )
        trainer.fit(Classifier(), loader)
    bare = statistics.median(timed.steps[2:])
    print(f"ResNet-18, batch 128 x 3 x 32 x 32, {every} steps, bare step {bare * 1e3:.1f} ms")
    for name, (_, period) in contestants.items():
        busy = sorted(seconds[name][2:])[-(every // 6) :] if period > 1 else seconds[name][2:]
        share = statistics.median(busy) / period / bare
        print(
            f"  {name:<40}{statistics.median(busy) * 1e3:>9.2f} ms each time"
            f"{100 * share:>8.2f} % of a step"
        )


# ------------------------------------------------------------ tau
def tau(options):
    network = models.resnet18(10)
    sym = discover(network.eval(), torch.randn(2, 3, 32, 32))
    orders = UnitOrders(sym).to(options.device)
    params = {k: v.to(options.device) for k, v in P.of(network).items()}
    before = orders(params)
    moved = {
        k: v + 0.01 * torch.randn_like(v) if P.is_weight(k, v) else v for k, v in params.items()
    }
    after = orders(moved)
    sizes = orders.sizes.tolist()
    pairs = [
        (ranks(before[g, :n]).cpu().numpy(), ranks(after[g, :n]).cpu().numpy())
        for g, n in enumerate(sizes)
    ]

    def ours():
        return order_change(before, after, orders.sizes).tau

    def scipy_loop():
        return [kendalltau(a, b).statistic for a, b in pairs]

    def sort():
        return orders(params)

    for function in (ours, scipy_loop, sort):
        function()
    times = {f.__name__: [] for f in (ours, scipy_loop, sort)}
    for _ in range(21):
        for function in (ours, scipy_loop, sort):
            synchronise(options.device)
            start = time.perf_counter()
            function()
            synchronise(options.device)
            times[function.__name__].append(time.perf_counter() - start)
    median = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    error = max(abs(a - b) for a, b in zip(ours().tolist(), scipy_loop(), strict=True))
    print(f"Kendall's tau of {len(sizes)} groups of {min(sizes)} to {max(sizes)} units")
    print(f"  lightning_bnn {median['ours']:.3f} ms, scipy loop {median['scipy_loop']:.3f} ms")
    print(f"  ratio {median['scipy_loop'] / median['ours']:.1f} x, difference {error:.0e}")
    print(f"  sorting all units before: {median['sort']:.3f} ms")


# ------------------------------------------------------------ bank
def bank(options):
    network, rows = P.of(models.resnet18(10)), options.rows
    size = sum(t.nbytes for t in network.values()) / 1e6
    print(f"{rows} networks of {size:.1f} MB, fsynced")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store, files = CheckpointBank(f"{folder}/bank"), []
        ours, theirs = [], []
        for row in range(rows):
            start = time.perf_counter()
            store.append(network, step=row)
            middle = time.perf_counter()
            files.append(Path(folder) / f"{row}.pt")
            with files[-1].open("wb") as file:
                torch.save(network, file)
                file.flush()
                os.fsync(file.fileno())
            ours.append(middle - start)
            theirs.append(time.perf_counter() - middle)
        show("append / torch.save", ours, theirs)
        ours, theirs = [], []
        for row in range(rows):
            start = time.perf_counter()
            store[row]
            middle = time.perf_counter()
            torch.load(files[row], weights_only=True)
            ours.append(middle - start)
            theirs.append(time.perf_counter() - middle)
        show("one network / torch.load", ours, theirs)
        name = max(store.shapes, key=lambda k: store.shapes[k].numel())
        ours, theirs = [], []
        for _ in range(3):
            start = time.perf_counter()
            store.read(name, slice(0, rows), slice(0, 100_000)).sum()
            middle = time.perf_counter()
            parts = [torch.load(f, weights_only=True, mmap=True)[name] for f in files]
            torch.stack([p.flatten()[:100_000] for p in parts]).sum()
            ours.append(middle - start)
            theirs.append(time.perf_counter() - middle)
        show(f"100 000 columns of {rows} rows / torch.load(mmap)", ours, theirs)
        store.close()
    small = P.of(models.optunet())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = CheckpointBank(folder)
        start = time.perf_counter()
        for row in range(1000):
            store.append(small, step=row)
        middle = time.perf_counter()
        store.layer("0.weight").sum()
        print(f"1000 OptuNets: append {middle - start:.2f} s in all, ", end="")
        print(f"one layer of 1000 rows {(time.perf_counter() - middle) * 1e3:.2f} ms")


def show(what, ours, theirs):
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"  {what:<56}{a * 1e3:>9.2f} ms{b * 1e3:>9.2f} ms{b / a:>8.2f} x")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["steps", "tau", "bank"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--folder", default=None, help="where the bank is written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"steps": steps, "tau": tau, "bank": bank}[options.part](options)


if __name__ == "__main__":
    main()
