"""Merged adapters compute what those of peft compute together."""

import json

import pytest
import torch
from torch import nn

from weightsym.cli import main
from weightsym.files import open_network, read_file, save_tensors
from weightsym.networks.files.adapters import Adapter, compressed, sum_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.one, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 1), nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(self.one(self.conv(x).relu()).relu().mean((-2, -1)))


TOKENS = torch.arange(16).reshape(2, 8) + 3
KINDS = {
    "lora": (bert, {"target_modules": ["query", "value"], "r": 3, "lora_alpha": 7}),
    "rslora": (bert, {"target_modules": ["dense"], "r": 4, "use_rslora": True}),
    "patterns": (
        bert,
        {"target_modules": ["query", "key"], "r": 2, "rank_pattern": {"key": 5},
         "alpha_pattern": {"layer.1.attention.self.key": 9}},
    ),
    "embedding": (bert, {"target_modules": ["word_embeddings", "query"], "r": 2}),
    "biases": (bert, {"target_modules": ["query"], "bias": "all"}),
    "biases of layers": (bert, {"target_modules": ["query"], "bias": "lora_only"}),
    "bias of B": (bert, {"target_modules": ["query"], "lora_bias": True}),
    "head": (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    "dora": (bert, {"target_modules": ["query", "dense"], "r": 3, "use_dora": True}),
    "inputs first": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "inputs first, dora": (
        gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}
    ),
    "convolutions": (Convolutions, {"target_modules": ["conv", "one", "fc"], "r": 3}),
    "convolutions, dora": (
        Convolutions, {"target_modules": ["conv", "fc"], "r": 3, "use_dora": True}
    ),
}  # fmt: skip
WHOLE = {"biases", "biases of layers", "head"}
"""Adapters with tensors that are trained as a whole."""


def outputs(net):
    torch.manual_seed(3)
    bare = net.get_base_model() if isinstance(net, peft.PeftModel) else net
    x = torch.randn(2, 3, 6, 6) if isinstance(bare, Convolutions) else TOKENS
    with torch.no_grad():
        result = net(x)
    return result if isinstance(result, torch.Tensor) else result.logits


def adapted(make, options, seed):
    """A network with an adapter that is nowhere zero."""
    model = peft.get_peft_model(make(), peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    return model.eval()


def saved(name, folder, *seeds):
    """The base and adapters, in folders, and the networks with them."""
    make, options = KINDS[name]
    base = make()
    if hasattr(base, "save_pretrained"):
        base.save_pretrained(folder / "base")
        form = folder / "base"
    else:
        form = folder / "base.safetensors"
        save_tensors(form, base.state_dict())
    networks = [adapted(make, options, seed) for seed in seeds]
    for seed, network in zip(seeds, networks, strict=True):
        network.save_pretrained(folder / str(seed))
    return form, [str(folder / str(seed)) for seed in seeds], networks


def loaded(name, path):
    make = KINDS[name][0]
    if path.is_dir():
        return type(make()).from_pretrained(path).eval()
    net = make()
    net.load_state_dict({n: t.read() for n, t in read_file(path).tensors.items()})
    return net.eval()


def with_adapter(name, path):
    return peft.PeftModel.from_pretrained(KINDS[name][0](), path).eval()


# ------------------------------------------------------------ laws
@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_in_its_base_computes_the_same(name, tmp_path):
    form, (path,), (network,) = saved(name, tmp_path, 1)
    out = tmp_path / ("merged" if form.is_dir() else "merged.safetensors")
    main(["adapters", path, "--base", str(form), "--out", str(out)])
    found = outputs(loaded(name, out))
    torch.testing.assert_close(found, outputs(network), atol=2e-5, rtol=1e-4)
    assert (found - outputs(KINDS[name][0]())).abs().max() > 1e-3


@pytest.mark.parametrize("name", [n for n in KINDS if "dora" not in n])
def test_adapters_merge_to_one_that_adds_what_both_add(name, tmp_path):
    """With the base as judge, whose weights take both up by themselves."""
    form, paths, _ = saved(name, tmp_path, 1, 2)
    weights = ["--weights", "1.5", "-0.5"]
    whole = tmp_path / ("whole" if form.is_dir() else "whole.safetensors")
    main(["adapters", *paths, *weights, "--base", str(form), "--out", str(whole)])
    main(["adapters", *paths, *weights, "--out", str(tmp_path / "both")])
    found = outputs(with_adapter(name, tmp_path / "both"))
    wanted = outputs(loaded(name, whole))
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)
    for path in paths:
        assert (found - outputs(with_adapter(name, path))).abs().max() > 1e-3


def test_an_adapter_and_its_negative_leave_the_base_alone(tmp_path):
    _, (path,), _ = saved("lora", tmp_path, 1)
    main(["adapters", path, path, "--weights", "1", "-1", "--out", str(tmp_path / "none")])
    found = outputs(with_adapter("lora", tmp_path / "none"))
    torch.testing.assert_close(found, outputs(bert()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["lora", "embedding", "convolutions"])
def test_a_lower_rank_is_the_best_there_is(name, tmp_path):
    _, paths, _ = saved(name, tmp_path, 1, 2)
    merged = sum_of([Adapter.read(tmp_path / p) for p in paths], [1.0, 1.0])
    smaller, error = compressed(merged, 2)
    dropped = total = 0.0
    for module, layer in merged.layers.items():
        product = layer.up.flatten(1).double() @ layer.down.flatten(1).double()
        left, values, right = torch.linalg.svd(product, full_matrices=False)
        best = left[:, :2] * values[:2] @ right[:2]
        other = smaller.layers[module]
        found = other.up.flatten(1).double() @ other.down.flatten(1).double()
        torch.testing.assert_close(found, best, atol=1e-5, rtol=0)
        dropped += float(values[2:].square().sum())
        total += float(values.square().sum())
    assert error == pytest.approx((dropped / total) ** 0.5, rel=1e-4)
    main(["adapters", *paths, "--rank", "2", "--out", str(tmp_path / "small")])
    config = json.loads((tmp_path / "small" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 2)
    with_adapter(name, tmp_path / "small")


def test_layers_that_only_one_adapter_has_keep_their_ranks(tmp_path):
    make, options = KINDS["lora"]
    for seed, modules in ((1, ["query"]), (2, ["query", "value"])):
        adapted(make, options | {"target_modules": modules}, seed).save_pretrained(
            tmp_path / str(seed)
        )
    form = tmp_path / "base"
    make().save_pretrained(form)
    paths = [str(tmp_path / "1"), str(tmp_path / "2")]
    main(["adapters", *paths, "--out", str(tmp_path / "both")])
    main(["adapters", *paths, "--base", str(form), "--out", str(tmp_path / "whole")])
    found = Adapter.read(tmp_path / "both")
    assert {n[-5:]: layer.rank for n, layer in found.layers.items()} == {"query": 6, "value": 3}
    torch.testing.assert_close(
        outputs(with_adapter("lora", tmp_path / "both")),
        outputs(loaded("lora", tmp_path / "whole")),
        atol=5e-5, rtol=1e-4,
    )  # fmt: skip


def test_the_mean_of_factors_is_another_function(tmp_path):
    """What averages of A and of B would give: the reason for adding products."""
    _, paths, _ = saved("lora", tmp_path, 1, 2)
    one, two = (Adapter.read(tmp_path / p) for p in paths)
    layers = {
        n: a._replace(down=(a.down + b.down) / 2, up=(a.up + b.up) / 2)
        for (n, a), b in zip(one.layers.items(), two.layers.values(), strict=True)
    }
    Adapter(one.path, one.config, layers, {}).write(tmp_path / "naive")
    main(["adapters", *paths, "--weights", "0.5", "0.5", "--out", str(tmp_path / "mean")])
    naive, mean = (outputs(with_adapter("lora", tmp_path / n)) for n in ("naive", "mean"))
    assert (naive - mean).abs().max() > 1e-3


# ------------------------------------------------------------ refusals
def fails(capsys, *words):
    with pytest.raises(SystemExit) as info:
        main(["adapters", *words])
    assert info.value.code == 2
    return capsys.readouterr().err


def edited(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "is an adapter of type 'IA3'"),
        ({"use_qalora": True}, "uses `use_qalora`"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base"),
        ({"lora_alpha": "much"}, "cannot be read: could not convert string"),
        ({"lora_alpha": float("nan")}, "is nan"),
        ({"alpha_pattern": {"(": 3}}, "cannot be read: missing )"),
        ({"alpha_pattern": [1]}, "cannot be read: 'list' object"),
    ],
)
def test_other_adapters_are_refused(changes, words, tmp_path, capsys):
    saved("lora", tmp_path, 1)
    edited(tmp_path / "1", **changes)
    assert words in fails(capsys, str(tmp_path / "1"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_has_no_sum_is_refused(tmp_path, capsys):
    form, paths, _ = saved("head", tmp_path, 1, 2)
    out = ["--out", str(tmp_path / "out")]
    assert "the weights do not add up to one" in fails(capsys, *paths, *out)
    _, doras, _ = saved("dora", tmp_path, 3)
    assert "magnitudes (DoRA)" in fails(capsys, *doras, *out)
    assert "has no adapter_config.json" in fails(capsys, str(form), *out).replace("it ", "")
    with pytest.raises(ValueError, match="is an adapter: `weightsym adapters` merges it"):
        open_network(tmp_path / "1")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").touch()
    replacing = ["--out", str(tmp_path / "used"), "--overwrite", "true"]
    halves = ["--weights", "0.5", "0.5"]
    assert "also contains 'mine.txt'" in fails(capsys, *paths, *replacing, *halves)
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["mine.txt"]
    assert "must be 2 numbers, got 1" in fails(capsys, *paths, *out, "--weights", "1")
    wrong = tmp_path / "wrong"
    gpt2().save_pretrained(wrong)
    assert "has no '" in fails(capsys, *paths, "--base", str(wrong), *out)
    _, others, _ = saved("convolutions", tmp_path, 4)
    tensors = {
        n: t.read() for n, t in read_file(tmp_path / "4/adapter_model.safetensors").tensors.items()
    }
    key = next(k for k in tensors if "lora_A" in k)
    tensors[key] = tensors[key] * torch.nan
    (tmp_path / "4/adapter_model.safetensors").unlink()
    save_tensors(tmp_path / "4/adapter_model.safetensors", tensors)
    assert "NaN" in fails(capsys, *others, *out)
