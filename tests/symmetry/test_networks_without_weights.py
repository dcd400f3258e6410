"""`discover` needs no weights: networks whose matrices are on the meta device."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from weightsym import discover
from weightsym.commands import networks
from weightsym.discovery.cache import forget
from weightsym.discovery.random_weights import RandomWeights
from weightsym.networks.forward import Inputs, called, called_in_turn
from weightsym.networks.meta import matrices_on_meta, reserved

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = {"vocab_size": 40, "pad_token_id": 39}
PLAIN = {**SIZES, **TOKENS, "num_hidden_layers": 1, "max_position_embeddings": 48}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
IMAGES = {**SIZES, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "num_channels": 3}
GPT2 = {**TOKENS, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
NETWORKS = {
    "LlamaForCausalLM": GROUPED | {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": GROUPED | {"head_dim": 4},
    "GemmaForCausalLM": GROUPED | {"head_dim": 4},
    "MixtralForCausalLM": GROUPED | {"num_local_experts": 3},
    "GPT2LMHeadModel": GPT2 | {"bos_token_id": 0, "eos_token_id": 0},
    "GPTNeoXForCausalLM": PLAIN,
    "OPTForCausalLM": PLAIN | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "BertForMaskedLM": PLAIN,
    "ViTForImageClassification": IMAGES,
    "T5ForConditionalGeneration": {**TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24,
                                   "num_layers": 1, "num_heads": 2},
}  # fmt: skip


def made(name):
    network_class = getattr(transformers, name)
    config = network_class.config_class(**NETWORKS[name])
    config._attn_implementation, config.use_cache = "eager", False
    torch.manual_seed(0)
    return network_class(config).float().eval()


def example_for(network):
    generator = torch.Generator().manual_seed(0)
    if network.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    tokens = torch.randint(0, 40, (2, 8), generator=generator)
    seq2seq = network.config.is_encoder_decoder
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if seq2seq else {})


def _maps(positions):
    """What corresponds in two units, in whatever order it is listed."""
    return sorted(zip(*positions.flatten(0, -2).tolist(), strict=True))


def described(sym):
    placements = [
        (field, k, p.axis, p.exponent, *_maps(p.positions))
        for field in ("permutations", "scalings", "signs", "linear", "shifts")
        for k, group in enumerate(getattr(sym, field))
        for p in group.placements
    ]
    axes = [(a.tensor, a.dim, a.size, a.blocks, a.role) for a in sym.axes]
    return str(sym), sym.unchecked, sym.shapes, sym.aliases, sym.weights, axes, placements


FIRST = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "ViTForImageClassification")


def each(names):
    """Parameters of a law; networks beyond the first ones are tested with `e2e`, at 2 s each."""
    marks = {name: () if name in FIRST else pytest.mark.e2e for name in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


@functools.cache
def of_the_network_with_weights(name):
    network = made(name)
    forget()
    return described(discover(network, **example_for(network)))


@each(NETWORKS)
def test_symmetries_are_those_of_the_network_with_weights(name):
    with matrices_on_meta():
        empty = made(name)
    assert sum(p.numel() for p in empty.parameters() if p.is_meta) > 1000
    example = example_for(empty)
    forget()
    found = discover(empty, **example)
    assert all(p.is_meta for p in empty.parameters() if p.ndim > 1)  # it is left as it was
    assert described(found) == of_the_network_with_weights(name)
    assert found.error < 1e-12


@each(n for n in NETWORKS if n != "T5ForConditionalGeneration")
def test_few_tokens_show_what_all_show(name, monkeypatch):
    calls = []
    monkeypatch.setattr(networks, "discover", lambda *a, **k: calls.append(a) or discover(*a, **k))
    monkeypatch.setattr(networks, "_TOKENS_SEEN", 23)
    with matrices_on_meta():
        empty = made(name)
    forget()
    example = tuple(example_for(empty).values())
    found = networks.symmetries_in(empty, *example)
    assert described(found) == of_the_network_with_weights(name)
    has_tokens = empty.main_input_name == "input_ids"
    assert [23 in {len(p) for p in a[0].parameters()} for a in calls] == [has_tokens]
    assert 23 not in {len(p) for p in empty.parameters()}


def test_what_breaks_a_symmetry_is_seen_without_weights():
    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).relu().cumsum(-1))

    layers = (nn.Linear(3, 4, device="meta"), nn.Linear(4, 2, device="meta"))
    assert not discover(Net(*layers), torch.randn(4, 3)).permutations
    chain = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    assert [g.units for g in discover(chain, torch.randn(4, 3)).permutations] == [4]


@each(NETWORKS)
def test_weights_that_are_read_in_turn_are_those_that_are_held(name):
    network = made(name)
    weights, inputs = RandomWeights.of_unknown(network), Inputs((), example_for(network))
    with torch.no_grad():
        whole = called(network, weights.all(), inputs)[0]
        read = []

        def reading(name):
            read.append(name)
            return weights.read(weights.sym.aliases.get(name, name))

        in_turn = called_in_turn(network, reading, inputs)[0]
        assert torch.equal(in_turn, whole)
        assert {n for n, _ in network.named_parameters()} == {*read} & {*weights.state}
        other = called_in_turn(network, lambda name: 1.1 * reading(name), inputs)[0]
    assert not torch.allclose(other, whole)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the memory in use")
def test_what_is_reserved_takes_no_memory():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    zeros = reserved(torch.empty(2**14, 2**14, device="meta"))
    assert resident() - before < 2**24
    zeros[: 2**12] = 1  # a quarter is written
    assert resident() - before > 2**27
