"""Blocks and architectures that people use, with their groups, scales and signs counted by hand."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cases import randomise
from modern_networks import (
    GAT,
    GCN,
    Decoder,
    GatedMLP,
    LoRA,
    LowRank,
    Mamba,
    MergedLoRA,
    MoE,
    attention,
    path,
)
from torch import nn

from lightning_bnn.symmetry import discover, verify

CHANNEL, BLOCK = "channel", "block"


@dataclass(frozen=True)
class Known:
    """A network, inputs of any batch size, and its groups by units and kind.

    ``second_signs`` are those that discovery does not look for: where both factors of a product are
    free, one of them may flip beside the product, or beside the other one.
    """

    name: str
    build: Any
    inputs: Any
    groups: dict[tuple[int, str], int]
    scales: int
    signs: int
    second_signs: int = field(default=0)
    dimension: int | None = field(default=None)
    tolerance: float = field(default=1e-10)


def sequences(d):
    return lambda batch, length: (torch.randn(batch, length, d),)


def tokens(batch, length):
    return (torch.randint(4, 11, (batch, length)),)


def graphs(batch, _):
    return torch.randn(batch, 5, 5), path(5)


def known(case, batch=2, length=5):
    """Whether everything that was counted by hand is found, and keeps the function elsewhere."""
    torch.manual_seed(0)
    model = randomise(case.build().double()).eval()
    example, others = case.inputs(batch, length), case.inputs(batch + 1, length - 2)
    example, others = (
        [x.double() if x.is_floating_point() else x for x in i] for i in (example, others)
    )
    symmetries = discover(model, *example)
    assert Counter((g.units, g.kind) for g in symmetries.permutations) == Counter(case.groups)
    signs = case.signs - case.second_signs
    assert (symmetries.scaling_dof, symmetries.sign_dof) == (case.scales, signs)
    log10 = sum(k * math.log10(math.factorial(n)) for (n, _), k in case.groups.items())
    assert math.isclose(symmetries.log10_permutations, log10, rel_tol=1e-12, abs_tol=1e-12)
    assert case.dimension in (None, symmetries.dimension)
    assert not symmetries.frozen
    assert verify(model, symmetries, *example) < case.tolerance
    assert verify(model, symmetries, *others) < case.tolerance


def parameters(cases):
    return [pytest.param(case, id=case.name) for case in cases]


X = sequences(10)

# h heads of w channels: queries with keys, values with outputs
BLOCKS = [
    # w channels inside each of two pairs of h heads, each with scale and sign; h heads
    Known("attention", attention(), X, {(3, CHANNEL): 4, (2, BLOCK): 1}, 12, 12),
    Known("without bias", attention(bias=False), X, {(3, CHANNEL): 4, (2, BLOCK): 1}, 12, 12),
    Known("dropout", attention(dropout=0.1), X, {(3, CHANNEL): 4, (2, BLOCK): 1}, 12, 12),
    # as many pairs as heads of keys; two queries in each of two groups, and the groups
    Known(
        "grouped queries",
        attention(heads=4, kv_heads=2),
        X,
        {(3, CHANNEL): 4, (2, BLOCK): 3},
        12,
        12,
    ),
    # one pair; four queries
    Known(
        "one key for all",
        attention(heads=4, kv_heads=1),
        X,
        {(3, CHANNEL): 2, (4, BLOCK): 1},
        6,
        6,
    ),
    # no two frequencies alike: values only; one scale and sign per frequency, h w / 2; h heads
    *(
        Known(
            f"rotary {layout}",
            attention(width=4, rotary=layout),
            X,
            {(4, CHANNEL): 2, (2, BLOCK): 1},
            4 + 8,
            4 + 8,
        )
        for layout in ("half", "interleaved")
    ),
    Known(
        "rotary, grouped queries",
        attention(heads=4, kv_heads=2, width=4, rotary="half"),
        X,
        {(4, CHANNEL): 2, (2, BLOCK): 3},
        4 + 8,
        4 + 8,
    ),
    # two frequencies and two free channels per head
    Known(
        "partly rotary",
        attention(width=6, rotary="half", rotated=4),
        X,
        {(2, CHANNEL): 2, (6, CHANNEL): 2, (2, BLOCK): 1},
        4 + 4 + 12,
        4 + 4 + 12,
    ),
    # one order for both heads' queries; scale: gain against gain; signs: h w between queries and
    # keys, 2 w of the gains
    Known(
        "query-key norm",
        attention(norm="shared"),
        X,
        {(3, CHANNEL): 3, (2, BLOCK): 1},
        3 + 6,
        6 + 6 + 6,
        second_signs=6,
    ),
    # gains of their own: an order, gain against gain, and 3 signs per channel of a head
    Known(
        "query-key norms of heads",
        attention(norm="own"),
        X,
        {(3, CHANNEL): 4, (2, BLOCK): 1},
        12,
        18 + 6,
    ),
    # per frequency: gain against gain, a sign per head; 2 w signs of the gains
    Known(
        "query-key norm, rotary",
        attention(norm="shared", width=4, rotary="half"),
        X,
        {(4, CHANNEL): 2, (2, BLOCK): 1},
        2 + 8,
        4 + 8 + 8,
        second_signs=8,
    ),
    # every head has a slope of its own: no exchange
    Known("ALiBi", attention(positions="alibi"), X, {(3, CHANNEL): 4}, 12, 12),
    # columns of the table move with the heads
    Known("T5 table", attention(positions="t5"), X, {(3, CHANNEL): 4, (2, BLOCK): 1}, 12, 12),
    # without softmax one more scale and sign per head, between scores and values
    Known(
        "linear attention",
        attention(scores="linear", bias=False),
        X,
        {(3, CHANNEL): 4, (2, BLOCK): 1},
        12 + 2,
        12 + 2,
        second_signs=2,
    ),
    # the map stops scales and signs of queries and keys
    Known(
        "linear attention with a map",
        attention(scores="elu", bias=False),
        X,
        {(3, CHANNEL): 4, (2, BLOCK): 1},
        6,
        6,
    ),
    # scale and sign of the linear half
    Known("SwiGLU", GatedMLP, sequences(6), {(10, CHANNEL): 1}, 10, 10),
    # both halves against the output
    Known(
        "bilinear",
        lambda: GatedMLP(activation=nn.Identity()),
        sequences(6),
        {(10, CHANNEL): 1},
        20,
        20,
        second_signs=10,
    ),
    # ReLU units inside every expert; experts with their rows of the router
    Known("experts", MoE, sequences(5), {(4, CHANNEL): 3, (3, BLOCK): 1}, 12, 0),
    Known(
        "best two experts",
        lambda: MoE(top=2),
        sequences(5),
        {(4, CHANNEL): 3, (3, BLOCK): 1},
        12,
        0,
    ),
    # channels, states, rank; row against convolution, state, rank, one number for all
    Known(
        "Mamba",
        Mamba,
        sequences(6),
        {(10, BLOCK): 1, (5, CHANNEL): 1, (3, CHANNEL): 1},
        10 + 5 + 3 + 1,
        10 + 5 + 3 + 1,
        second_signs=1,
        dimension=10 + 5 + 9 + 1,
    ),
    # tanh units, and the rank
    Known("LoRA", LoRA, sequences(6), {(7, CHANNEL): 1, (2, CHANNEL): 1}, 2, 7 + 2),
    Known(
        "merged LoRA",
        MergedLoRA,
        sequences(6),
        {(7, CHANNEL): 1, (2, CHANNEL): 1},
        2,
        7 + 2,
    ),
    Known("low rank", LowRank, sequences(6), {(3, CHANNEL): 1, (5, CHANNEL): 1}, 3, 3 + 5),
    # stream, queries, values, units; gains 3 d and head 2 w; signs: the stream, too
    Known("decoder", Decoder, tokens, {(6, CHANNEL): 3, (7, CHANNEL): 1}, 18 + 12, 18 + 12 + 6),
    Known(
        "decoder, SwiGLU",
        lambda: Decoder(heads=2, width=3, gated=True),
        tokens,
        {(6, CHANNEL): 1, (3, CHANNEL): 4, (7, CHANNEL): 1, (2, BLOCK): 1},
        18 + 12 + 7,
        18 + 12 + 7 + 6,
    ),
    # a layer norm lets the whole stream flip only
    Known(
        "decoder, layer norm",
        lambda: Decoder(norm=nn.LayerNorm),
        tokens,
        {(6, CHANNEL): 3, (7, CHANNEL): 1},
        18 + 12,
        18 + 12 + 1,
    ),
    Known("graph convolution", GCN, graphs, {(6, CHANNEL): 1}, 6, 0),
    # ELU stops scales and signs
    Known(
        "graph attention",
        GAT,
        graphs,
        {(4, CHANNEL): 3, (3, BLOCK): 1},
        0,
        0,
    ),
]


@pytest.mark.parametrize("case", parameters(BLOCKS))
def test_blocks_have_the_groups_that_were_counted_by_hand(case):
    known(case)


# ------------------------------------------------------------ transformers
class Logits(nn.Module):
    """What a model of transformers says, without its cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def hugging_face(name, **options):
    """A tiny model: two layers, 4 heads of 8 channels, 48 units."""

    def build():
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name[0]}Config")(
            attn_implementation="eager", use_cache=False, **options
        )
        return Logits(getattr(transformers, "".join(name))(config))

    return build


class Translator(Logits):
    """The same of a model that reads one sequence and writes another."""

    def forward(self, x, y):
        return self.model(x, decoder_input_ids=y, use_cache=False).logits


def seq2seq(name, **options):
    def build():
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**options)
        config._attn_implementation = "eager"
        return Translator(getattr(transformers, f"{name}ForConditionalGeneration")(config))

    return build


class Likeness(Logits):
    def forward(self, x, y):
        return self.model(input_ids=x, pixel_values=y).logits_per_image


def clip():
    transformers = pytest.importorskip("transformers")
    tower = {k: v for k, v in BERT.items() if k != "vocab_size"}
    text = tower | {"vocab_size": 11, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 1}
    vision = tower | {"image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    config._attn_implementation = "eager"
    return Likeness(transformers.CLIPModel(config))


def timm_vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("test_vit", img_size=32, num_classes=5)


BERT = {
    "vocab_size": 11,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
LLAMA = BERT | {"num_key_value_heads": 2, "tie_word_embeddings": False}


def images(batch, _):
    return (torch.randn(batch, 3, 32, 32),)


def pairs(batch, length):
    return (*tokens(batch, length), *tokens(batch, length - 1))


def spectra(batch, length):
    return (torch.randn(batch, 16, 20), *tokens(batch, length))


def words_and_images(batch, length):
    return (*tokens(batch, length), *images(batch, length))


ENCODER = {(32, CHANNEL): 1, (8, CHANNEL): 16, (48, CHANNEL): 2, (4, BLOCK): 2}
GROUPED = {(32, CHANNEL): 1, (8, CHANNEL): 4, (48, CHANNEL): 2, (2, BLOCK): 6}

ARCHITECTURES = [
    # heads 2 * 64; post-norm: only the last gain is free; a sign for the input of each of 5 norms.
    # dimension: 16 GL(8), that gain, shifts of 32: 2 of keys (values have dropout in training), of
    # the last norm and that of the head, whose readers have biases, and of types against positions
    *(
        Known(
            name,
            hugging_face((name, "ForMaskedLM"), **BERT),
            tokens,
            ENCODER,
            128 + 32,
            160 + 5,
            dimension=16 * 64 + 32 + 5 * 32,
        )
        for name in ("Bert", "Roberta")
    ),
    # heads, 4 gains (the last is tied to the embedding); the stream flips as a whole.
    # dimension: 16 GL(8), shifts of 2 keys and of the 4 norms with these gains
    Known(
        "GPT2",
        hugging_face(
            ("GPT2", "LMHeadModel"),
            vocab_size=11,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            n_positions=40,
        ),
        tokens,
        ENCODER,
        128 + 128,
        256 + 1,
        dimension=16 * 64 + 128 + 6 * 32,
    ),
    # one frequency and 6 free channels per head; 5 gains
    Known(
        "GPTNeoX",
        hugging_face(("GPTNeoX", "ForCausalLM"), **BERT),
        tokens,
        {(32, CHANNEL): 1, (6, CHANNEL): 8, (8, CHANNEL): 8, (48, CHANNEL): 2, (4, BLOCK): 2},
        56 + 64 + 160,
        280 + 1,
    ),
    # per layer 2 * 4 frequencies, 2 * 8 values, 48 units; 5 gains; signs: the stream, too.
    # dimension: two numbers per frequency, GL(8) for the values of each of 2 keys
    *(
        Known(
            name,
            hugging_face((name, "ForCausalLM"), **LLAMA),
            tokens,
            GROUPED,
            2 * (8 + 16 + 48) + 160,
            304 + 32,
            dimension=2 * (2 * 8 + 2 * 64 + 48) + 160,
        )
        for name in ("Llama", "Mistral", "Qwen2")
    ),
    # gain against gain for 4 frequencies; signs: 8 frequencies of two keys, 16 of gains
    Known(
        "Qwen3",
        hugging_face(("Qwen3", "ForCausalLM"), head_dim=8, **LLAMA),
        tokens,
        GROUPED,
        2 * (4 + 16 + 48) + 160,
        2 * (8 + 16 + 16 + 48) + 160 + 32,
        second_signs=32,
    ),
    # 4 experts of 48 units in each layer, whose matrices are gathered
    Known(
        "Mixtral",
        hugging_face(
            ("Mixtral", "ForCausalLM"),
            num_local_experts=4,
            experts_implementation="batched_mm",
            **LLAMA,
        ),
        tokens,
        {(32, CHANNEL): 1, (8, CHANNEL): 4, (48, CHANNEL): 8, (2, BLOCK): 6, (4, BLOCK): 2},
        2 * (8 + 16 + 4 * 48) + 160,
        2 * (8 + 16 + 4 * 48) + 160 + 32,
    ),
    # per layer 64 channels, 5 states, 3 of the step size. 3 gains of the stream; per layer the row
    # that writes a channel against its convolution, B against C for every state, 3 of the step
    # size, and one number for B, D and what reads them; signs: the stream, too.
    # dimension: GL(3) for the step size
    Known(
        "Mamba",
        hugging_face(
            ("Mamba", "ForCausalLM"),
            vocab_size=11,
            hidden_size=32,
            state_size=5,
            num_hidden_layers=2,
            conv_kernel=3,
            expand=2,
            time_step_rank=3,
            tie_word_embeddings=False,
        ),
        tokens,
        {(32, CHANNEL): 1, (3, CHANNEL): 2, (5, CHANNEL): 2, (64, BLOCK): 2},
        96 + 2 * (64 + 5 + 3 + 1),
        96 + 2 * (64 + 5 + 3 + 1) + 32,
        second_signs=2,
        dimension=96 + 2 * (64 + 5 + 9 + 1),
    ),
    # heads, 5 gains; dimension: 16 GL(8), shifts of 2 keys, 2 values, and 5 norms; two more, of the
    # class token and of patches against rows of the table of positions
    Known(
        "ViT",
        hugging_face(
            ("ViT", "ForImageClassification"),
            image_size=32,
            patch_size=8,
            **{k: v for k, v in BERT.items() if k not in ("vocab_size", "max_position_embeddings")},
        ),
        images,
        ENCODER,
        128 + 160,
        288 + 1,
        dimension=16 * 64 + 160 + 11 * 32,
    ),
]

TOWERS = [
    # attention: 2 layers of the encoder, 2 * 2 of the decoder, in each 4 heads of 8 channels of
    # keys and of values: 6 * 4 * 2 groups, GL(8) each; the heads of all layers of a stack share a
    # table of relative positions, those that read the encoder have none: 1 + 1 + 2 groups. One
    # table of words feeds both streams: one order of 32, and a sign each. 5 + 6 gains (root mean
    # square, before a linear map; the table of words reads the last of the decoder, too); 4 * 48
    # units with ReLU: scales, no signs.
    # dimension: 48 GL(8), gains, units, and one number for each head in the tables of positions
    Known(
        "T5",
        seq2seq(
            "T5",
            vocab_size=11,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
        ),
        pairs,
        {(32, CHANNEL): 1, (8, CHANNEL): 48, (48, CHANNEL): 4, (4, BLOCK): 4},
        6 * 64 + 11 * 32 + 4 * 48,
        6 * 64 + 11 * 32 + 32,
        dimension=48 * 64 + 11 * 32 + 4 * 48 + 2 * 4,
        tolerance=1e-6,  # its norms are computed in float32
    ),
    # conv1 has 32 units with GELU, the streams of encoder and decoder 32 each; 6 times attention,
    # each with heads of its own. 4 + 1 + 6 gains; the last of the decoder is read by the table of
    # words. The encoder adds what a GELU gives: no sign; the decoder flips as a whole.
    # dimension: 48 GL(8), gains, and 17 shifts of 32: of values in 6 attentions, and of 11 norms:
    # 4 before units, 2 before queries that read the encoder, 4 before attention within a stream
    # and the last of the encoder (their keys have no bias, but a softmax forgets what all of them
    # gain); not of the last of the decoder, which words read without a bias
    Known(
        "Whisper",
        seq2seq(
            "Whisper",
            vocab_size=11,
            d_model=32,
            num_mel_bins=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=10,
            max_target_positions=40,
            pad_token_id=1,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=1,
        ),
        spectra,
        {(32, CHANNEL): 3, (8, CHANNEL): 48, (48, CHANNEL): 4, (4, BLOCK): 6},
        6 * 64 + 11 * 32,
        6 * 64 + 11 * 32 + 1,
        dimension=48 * 64 + 11 * 32 + 17 * 32,
    ),
    # two towers as in ViT, 16 channels in which they meet. Per tower 2 * 64 channels of heads and
    # 5 gains before linear maps; each projection has one scale, since its rows are normalised.
    # signs: 16 where they meet, the stream of each tower, and the patches before the first norm.
    # dimension: 32 GL(8), gains, O(16), the biases of keys, and 13 shifts of 32: 3 in each layer,
    # and words against positions
    Known(
        "CLIP",
        clip,
        words_and_images,
        {(32, CHANNEL): 2, (8, CHANNEL): 32, (48, CHANNEL): 4, (4, BLOCK): 4, (16, CHANNEL): 1},
        2 * (128 + 160) + 2,
        2 * (128 + 160) + 16 + 3,
        dimension=32 * 64 + 10 * 32 + 120 + 4 * 32 + 13 * 32 + 2,
        tolerance=1e-6,  # scores are normalised in float32
    ),
    # 6 layers with 2 heads of 32 channels and 192 units; gains: 2 in each layer and the last
    Known(
        "timm: test_vit",
        timm_vit,
        images,
        {(64, CHANNEL): 1, (32, CHANNEL): 24, (192, CHANNEL): 6, (2, BLOCK): 6},
        6 * 128 + 13 * 64,
        6 * 128 + 13 * 64 + 1,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(ARCHITECTURES))
def test_architectures_have_the_groups_that_were_counted_by_hand(case):
    known(replace(case, tolerance=1e-6))  # norms and rotary tables are computed in float32 inside


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(TOWERS))
def test_networks_of_two_parts_have_the_groups_that_were_counted_by_hand(case):
    known(case)
