"""Small networks of transformers and timm, with symmetries counted by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from known_networks.table import add


class Logits(nn.Module):
    """The logits of a model of transformers, without its cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


class Translator(Logits):
    """The same of a model that reads one sequence and writes another."""

    def forward(self, x, y):
        return self.model(x, decoder_input_ids=y, use_cache=False).logits


class Likeness(Logits):
    """Scores of texts and images."""

    def forward(self, x, y):
        return self.model(input_ids=x, pixel_values=y).logits_per_image


def hugging_face(name, kind="ForCausalLM", wrap=Logits, **options):
    """How to build a tiny model: two layers, 4 heads of 8 channels, 48 units."""

    def build():
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**options)
        config._attn_implementation = "eager"
        if wrap is Logits:
            config.use_cache = False
        return wrap(getattr(transformers, name + kind)(config))

    return build


def tokens(batch=2, length=5):
    return lambda: torch.randint(4, 11, (batch, length))


def architecture(name, build, *counts, inputs=None, others=None, tolerance=1e-6, **known):
    """One more row; norms and rotary tables are computed in float32 inside."""
    inputs, others = inputs or [tokens()], others or [[tokens(3, 3)]]
    add(name, build, inputs, *counts, others=others, tolerance=tolerance, kernel=False, slow=True,
        **known)  # fmt: skip


BERT = {
    "vocab_size": 11,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
TOWER = {k: v for k, v in BERT.items() if k not in ("vocab_size", "max_position_embeddings")}
LLAMA = BERT | {"num_key_value_heads": 2, "tie_word_embeddings": False}
IMAGES = {"inputs": [(2, 3, 32, 32)], "others": [[(3, 3, 32, 32)]]}
ENCODER, GROUPED = "32 8*16 48*2 4b*2", "32 8*4 48*2 2b*6"

# heads 2 * 64; post-norm: only the last gain is free; a sign for the input of each of 5 norms.
# dimension: 16 GL(8), that gain, shifts of 32: 2 of keys (values have dropout in training), of the
# last norm and that of the head, whose readers have biases, and of types against positions
for name in ("Bert", "Roberta"):
    architecture(name, hugging_face(name, "ForMaskedLM", **BERT), ENCODER, 128 + 32, 160 + 5,
                 dimension=16 * 64 + 32 + 5 * 32)  # fmt: skip
# heads, 4 gains (the last is tied to the embedding); the stream flips as a whole.
# dimension: 16 GL(8), shifts of 2 keys and of the 4 norms with these gains
gpt2 = {"vocab_size": 11, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 40}
architecture("GPT2", hugging_face("GPT2", "LMHeadModel", **gpt2), ENCODER, 128 + 128, 256 + 1,
             dimension=16 * 64 + 128 + 6 * 32)  # fmt: skip
# one frequency and 6 free channels per head; 5 gains
architecture("GPTNeoX", hugging_face("GPTNeoX", **BERT), "32 6*8 8*8 48*2 4b*2", 56 + 64 + 160, 281)
# per layer 2 * 4 frequencies, 2 * 8 values, 48 units; 5 gains; signs: the stream, too.
# dimension: two numbers per frequency, GL(8) for the values of each of 2 keys
for name in ("Llama", "Mistral", "Qwen2"):
    architecture(name, hugging_face(name, **LLAMA), GROUPED, 2 * (8 + 16 + 48) + 160, 304 + 32,
                 dimension=2 * (2 * 8 + 2 * 64 + 48) + 160)  # fmt: skip
# gain against gain for 4 frequencies; signs: 8 frequencies of two keys, and of gains
architecture("Qwen3", hugging_face("Qwen3", head_dim=8, **LLAMA), GROUPED,
             2 * (4 + 16 + 48) + 160, 2 * (8 + 16 + 48) + 160 + 64)  # fmt: skip
# 4 experts of 48 units in each layer, whose matrices are gathered
experts = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
architecture("Mixtral", hugging_face("Mixtral", **experts, **LLAMA), "32 8*4 48*8 2b*6 4b*2",
             2 * (8 + 16 + 4 * 48) + 160, 2 * (8 + 16 + 4 * 48) + 160 + 32)  # fmt: skip
# per layer 64 channels, 5 states, 3 of the step size. 3 gains of the stream; per layer the row that
# writes a channel against its convolution, B against C for every state, 3 of the step size, and one
# number for B, D and what reads them; signs: the stream, too.
# dimension: GL(3) for the step size
mamba = {"vocab_size": 11, "hidden_size": 32, "state_size": 5, "num_hidden_layers": 2, "expand": 2,
         "conv_kernel": 3, "time_step_rank": 3, "tie_word_embeddings": False}  # fmt: skip
architecture("Mamba of transformers", hugging_face("Mamba", **mamba), "32 3*2 5*2 64*2",
             96 + 2 * (64 + 5 + 3 + 1), 96 + 2 * (64 + 5 + 3 + 1) + 32,
             dimension=96 + 2 * (64 + 5 + 9 + 1))  # fmt: skip
# heads, 5 gains; dimension: 16 GL(8), shifts of 2 keys, 2 values, and 5 norms; two more, of the
# class token and of patches against rows of the table of positions
vit = hugging_face("ViT", "ForImageClassification", image_size=32, patch_size=8, **TOWER)
architecture("ViT", vit, ENCODER, 128 + 160, 288 + 1, dimension=16 * 64 + 160 + 11 * 32, **IMAGES)

# attention: 2 layers of the encoder, 2 * 2 of the decoder, in each 4 heads of 8 channels of keys
# and of values: 6 * 4 * 2 groups, GL(8) each; the heads of all layers of a stack share a table of
# relative positions, those that read the encoder have none: 1 + 1 + 2 groups. One table of words
# feeds both streams: one order of 32, and a sign each. 5 + 6 gains (root mean square, before a
# linear map; the table of words reads the last of the decoder, too); 4 * 48 units with ReLU:
# scales, no signs. dimension: 48 GL(8), gains, units, and one number for each head in the tables
t5 = {"vocab_size": 11, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
PAIRS = {"inputs": [tokens(), tokens(2, 4)], "others": [[tokens(3, 3), tokens(3, 2)]]}
architecture("T5", hugging_face("T5", "ForConditionalGeneration", Translator, **t5),
             "32 8*48 48*4 4b*4", 6 * 64 + 11 * 32 + 4 * 48, 6 * 64 + 11 * 32 + 32,
             dimension=48 * 64 + 11 * 32 + 4 * 48 + 2 * 4, **PAIRS)  # fmt: skip
# conv1 has 32 units with GELU, the streams of encoder and decoder 32 each; 6 times attention, each
# with heads of its own. 4 + 1 + 6 gains; the last of the decoder is read by the table of words. The
# encoder adds what a GELU gives: no sign; the decoder flips as a whole.
# dimension: 48 GL(8), gains, and 17 shifts of 32: of values in 6 attentions, and of 11 norms: 4
# before units, 2 before queries that read the encoder, 4 before attention within a stream and the
# last of the encoder (their keys have no bias, but a softmax forgets what all of them gain); not of
# the last of the decoder, which words read without a bias
whisper = {"vocab_size": 11, "d_model": 32, "num_mel_bins": 16, "pad_token_id": 1,
           "max_source_positions": 10, "max_target_positions": 40, "bos_token_id": 1,
           "eos_token_id": 1, "decoder_start_token_id": 1}  # fmt: skip
for side in ("encoder", "decoder"):
    whisper |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
architecture("Whisper", hugging_face("Whisper", "ForConditionalGeneration", Translator, **whisper),
             "32*3 8*48 48*4 4b*6", 6 * 64 + 11 * 32, 6 * 64 + 11 * 32 + 1,
             dimension=48 * 64 + 11 * 32 + 17 * 32, inputs=[(2, 16, 20), tokens()],
             others=[[(3, 16, 20), tokens(3, 3)]])  # fmt: skip
# two towers as in ViT, 16 channels in which they meet. Per tower 2 * 64 channels of heads and 5
# gains before linear maps; each projection has one scale, since its rows are normalised.
# signs: 16 where they meet, the stream of each tower, and the patches before the first norm.
# dimension: 32 GL(8), gains, O(16), the biases of keys, and 13 shifts of 32: 3 in each layer, and
# words against positions
text = BERT | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 1}
vision = TOWER | {"image_size": 32, "patch_size": 8}
clip = {"text_config": text, "vision_config": vision, "projection_dim": 16}
architecture("CLIP", hugging_face("CLIP", "Model", Likeness, **clip), "32*2 8*32 48*4 4b*4 16",
             2 * (128 + 160) + 2, 2 * (128 + 160) + 16 + 3, inputs=[tokens(), (2, 3, 32, 32)],
             dimension=32 * 64 + 10 * 32 + 120 + 4 * 32 + 13 * 32 + 2,
             others=[[tokens(3, 3), (3, 3, 32, 32)]])  # fmt: skip


def timm_vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("test_vit", img_size=32, num_classes=5)


# 6 layers with 2 heads of 32 channels and 192 units; gains: 2 in each layer and the last
partial(architecture, tolerance=1e-10, **IMAGES)(
    "timm: test_vit", timm_vit, "64 32*24 192*6 2b*6", 6 * 128 + 13 * 64, 6 * 128 + 13 * 64 + 1
)
