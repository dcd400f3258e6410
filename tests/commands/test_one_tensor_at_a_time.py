"""`match` and `merge` of networks on disk: one tensor at a time gives what whole networks give."""

import itertools

import pytest
import torch
from disk_networks import Experts, normed
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_bnn.cli import main
from weightsym import Element, discover, match_all
from weightsym import params as P
from weightsym.commands import merge as command
from weightsym.files import NetworkNames, fit, open_network
from weightsym.groups.validation import check_finite, check_pair

WIDTH = 6


class Tied(nn.Module):
    """Tokens to logits by one table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        h = self.table(x)
        return self.head(h + self.down(self.up(h).relu()))


NETWORKS = {
    f"{__name__}.Tied": (Tied, torch.randint(0, 9, (4, 3)), "4,3:int64"),
    "disk_networks.Experts": (Experts, torch.randn(8, 4), "8,4"),
    "disk_networks.normed": (normed, torch.randn(8, 4), "8,4"),
}
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def written(path, network, dtype):
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in network.items()}
    if path.suffix == ".safetensors":
        save_file({n: t.contiguous() for n, t in state.items()}, path)
    else:
        torch.save({"state_dict": state, "epoch": 1}, path)
    return str(path)


def copies(name, folder, dtype, suffix):
    """A network, and two noisy copies in other frames, in files."""
    factory, x, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = factory().eval()
    sym, base = discover(net, x), P.of(net)
    generator = torch.Generator().manual_seed(1)
    networks = [base]
    for _ in range(2):
        order = Element.random(sym, generator)
        noisy = {
            n: t + 0.01 * torch.randn(t.shape, generator=generator) if t.ndim > 1 else t
            for n, t in base.items()
        }
        networks.append(order(noisy))
    return [written(folder / f"{k}{suffix}", w, dtype) for k, w in enumerate(networks)], sym


EACH = itertools.product(NETWORKS, (".safetensors", ".ckpt"))


@pytest.mark.parametrize(
    ("name", "suffix", "dtype"), [(*case, TYPES[k % 4]) for k, case in enumerate(EACH)]
)
def test_streamed_equals_whole(name, suffix, dtype, tmp_path, monkeypatch):
    paths, _ = copies(name, tmp_path, dtype, suffix)
    how = ["--network", name, "--input", NETWORKS[name][2], "--method", "reference"]
    whole, streamed, plain = (tmp_path / f"{n}.safetensors" for n in ("whole", "streamed", "plain"))
    main(["merge", *paths, *how, "--out", str(whole)])
    monkeypatch.setattr(command, "_LARGE", 0)
    monkeypatch.setattr(command, "_AT_ONCE", 30)
    main(["merge", *paths, *how, "--out", str(streamed)])
    main(["merge", *paths, *how[:4], "--method", "plain", "--out", str(plain)])
    one, two, other = load_file(whole), load_file(streamed), load_file(plain)
    assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in two.items()}
    for n in one:
        torch.testing.assert_close(two[n], one[n])
    far = [not torch.allclose(other[n].float(), one[n].float(), atol=1e-3) for n in one]
    assert any(far)  # what is matched to nothing is another average


def test_large_networks_are_matched_to_the_mean_of_the_others(tmp_path, monkeypatch, capsys):
    name = f"{__name__}.Tied"
    paths, _ = copies(name, tmp_path, torch.float32, ".safetensors")
    how, apart = ["--network", name, "--input", NETWORKS[name][2]], {}
    for large, method in ((2**26, "joint"), (0, "joint"), (0, "reference"), (0, "plain")):
        monkeypatch.setattr(command, "_LARGE", large)
        main(["merge", *paths, *how, "--method", method])
        out = capsys.readouterr().out
        apart[large, method] = float(out.split("distance to the average: ")[-1].split()[-1])
    assert apart[0, "joint"] < apart[2**26, "joint"] * 1.01
    assert apart[0, "joint"] <= apart[0, "reference"] < 0.9 * apart[0, "plain"]


@pytest.mark.parametrize("name", NETWORKS)
def test_matrices_act_one_tensor_at_a_time(name, tmp_path, monkeypatch):
    paths, sym = copies(name, tmp_path, torch.float32, ".safetensors")
    first, *others = (load_file(path) for path in paths)
    found = [match_all(network, first, sym) for network in others]
    moved = [f.element(network) for f, network in zip(found, others, strict=True)]
    wanted = P.weighted_mean(P.stack([first, *moved]))
    monkeypatch.setattr(command, "_LARGE", 0)
    how = ["--network", name, "--input", NETWORKS[name][2], "--method", "mixing"]
    main(["merge", *paths, *how, "--out", str(tmp_path / "mean.safetensors")])
    for n, t in load_file(tmp_path / "mean.safetensors").items():
        torch.testing.assert_close(t, wanted[n], rtol=1e-4, atol=1e-5)


def test_a_network_on_disk_is_a_mapping(tmp_path):
    paths, sym = copies(f"{__name__}.Tied", tmp_path, torch.bfloat16, ".safetensors")
    names = NetworkNames.of(Tied())
    first, second = (fit(open_network(tmp_path / f"{k}.safetensors"), names) for k in (0, 1))
    assert list(first) == list(names.tensors)
    assert len(first) == len(names.tensors)
    assert {n: (t.dtype, t.shape) for n, t in first.items()} == {
        n: (torch.bfloat16, first.shape(n)) for n in first
    }
    assert not check_pair(first, second, sym, sorted(sym.compared))
    check_finite(first, sym)
    state = load_file(paths[0])
    state["up.bias"][3] = torch.nan
    save_file(state, paths[0])
    bad = fit(open_network(tmp_path / "0.safetensors"), names)
    with pytest.raises(ValueError, match=r"0\.safetensors: 'up\.bias' holds NaN"):
        check_finite(bad, sym)
    with pytest.raises(ValueError, match=r"`params` lacks 'up\.bias'"):
        check_pair({n: t for n, t in first.items() if n != "up.bias"}, second, sym, [])
