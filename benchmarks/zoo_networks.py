"""Tiny networks of timm and transformers, chosen by walking their tables, with example inputs."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LARGEST = 20_000_000  # parameters

# what makes a configuration tiny, by the names that configurations use
SIZES = {
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers num_block_records e_layers d_layers "
        "encoder_num_hidden_layers decoder_num_hidden_layers num_attention_layers".split(),
        2,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads num_query_heads "
        "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads".split(),
        4,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads multi_query_group_num".split(), 2),
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size hidden_dim "
        "encoder_hidden_size decoder_hidden_size projection_dim model_dim out_hidden_size "
        "word_embed_proj_dim hidden_size_per_layer_input projection_size".split(),
        32,
    ),
    **dict.fromkeys("head_dim kv_channels attention_head_dim d_kv qk_rope_head_dim".split(), 8),
    **dict.fromkeys("v_head_dim qk_nope_head_dim".split(), 8),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 12),
    **dict.fromkeys(
        "intermediate_size ffn_dim d_ff n_inner d_inner ffn_hidden_size encoder_ffn_dim "
        "decoder_ffn_dim feed_forward_size moe_intermediate_size expert_ffn_hidden_size "
        "shared_expert_intermediate_size mlp_dim".split(),
        48,
    ),
    **dict.fromkeys("vocab_size text_vocab_size entity_vocab_size char_vocab_size".split(), 60),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_sequence_length".split(), 40),
    **dict.fromkeys(
        "num_local_experts n_routed_experts num_experts moe_num_experts num_routed_experts".split(),
        4,
    ),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_topk moe_k".split(), 2),
    **dict.fromkeys("n_group topk_group first_k_dense_replace n_shared_experts".split(), 1),
    **dict.fromkeys("image_size img_size input_size crop_size".split(), 32),
    **dict.fromkeys("patch_size tubelet_size_".split(), 8),
    **dict.fromkeys("sliding_window attention_window chunk_size block_size".split(), 8),
    **dict.fromkeys("max_source_positions max_target_positions".split(), 40),
    **dict.fromkeys("num_mel_bins input_feat_per_channel".split(), 16),
    **dict.fromkeys("state_size mamba_d_state d_state ssm_state_size mamba_d_state_".split(), 6),
}
TOKENS = "pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id".split()


@dataclass(frozen=True)
class Network:
    """A name, how to build the module, and how to draw inputs of a batch size and a length."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int, int], Iterator[dict[str, Any]]]


def networks(which: str) -> list[Network]:
    """All networks of "timm", "transformers" or "all"."""
    return [
        *(timm_networks() if which in ("all", "timm") else ()),
        *(transformers_networks() if which in ("all", "transformers") else ()),
    ]


# ------------------------------------------------------------ timm
SMALL = "test_ pico femto atto nano xxs xxtiny tiny xtiny mini _18 _xs small _b0 _s0 _000".split()


def timm_networks() -> list[Network]:
    """One small member of every family (every file) of timm."""
    import timm

    families = {m: timm.list_models(module=m) for m in timm.list_modules()}
    return [
        Network(f"timm/{family}", lambda names=names: _smallest(names), _images)
        for family, names in families.items()
        if names
    ]


def _smallest(names: list[str]) -> nn.Module:
    """The fewest parameters among the names that promise few, at a small image if it can be."""
    import timm

    ranked = sorted(names, key=lambda n: (not any(s in n for s in SMALL), len(n)))[:4]
    sizes = {}
    for name in ranked:
        with torch.device("meta"):
            try:
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            except Exception:  # noqa: BLE001  (some do not build without memory)
                sizes[name] = 10 * LARGEST
    name = min(sizes, key=sizes.__getitem__)
    if LARGEST < sizes[name] < 10 * LARGEST:
        raise ValueError(f"too large: {name} has {sizes[name]} parameters")
    try:
        model = timm.create_model(name, img_size=64, num_classes=10)
    except Exception:  # noqa: BLE001  (no such argument, or windows that do not fit)
        model = timm.create_model(name, num_classes=10)
    model.zoo_name = name
    return model


def _images(model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    own = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    for size in (64, 96, 128, own[-1]):
        yield {"x": torch.randn(batch, own[0], size, size)}


# ------------------------------------------------------------ transformers
HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_MAPPING",
)


def transformers_networks() -> list[Network]:
    """One model of every configuration, with the first of `HEADS` that there is for it."""
    import transformers

    tables = [getattr(transformers, head) for head in HEADS if hasattr(transformers, head)]
    return [
        Network(f"hf/{kind}", lambda kind=kind: _tiny(kind), _by_signature)
        for kind in sorted(transformers.CONFIG_MAPPING.keys())
        if any(transformers.CONFIG_MAPPING[kind] in table for table in tables)
    ]


def _tiny(kind: str) -> nn.Module:
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    models = [
        m
        for table in (getattr(transformers, head, None) for head in HEADS)
        if table is not None and config_class in table
        for m in [table[config_class]]
    ]
    if not models:
        raise LookupError("no model for this configuration")
    model_class = models[0] if not isinstance(models[0], tuple) else models[0][0]
    errors = []
    for form in (_shrunk, _shrunk_later):
        try:
            config = form(config_class)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > LARGEST:
                raise ValueError(f"too large: {size} parameters")
            return model_class(form(config_class))
        except Exception as error:  # noqa: BLE001  (the next form may build)
            errors.append(error)
    raise errors[0]


def _shrunk(config_class: Any) -> Any:
    """A configuration built from small numbers, so that what follows from them is small, too."""
    changes = _small(config_class())
    for key in [k for k, v in changes.items() if v is None]:
        del changes[key]
    return _with_common(config_class(**changes))


def _shrunk_later(config_class: Any) -> Any:
    """A default configuration whose numbers are made small afterwards."""
    config = config_class()
    for part in _parts(config):
        for key, value in SIZES.items():
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, value)
    return _with_common(config)


def _small(config: Any) -> dict[str, Any]:
    """Small values for what a configuration has, sub-configurations as dicts."""
    from transformers import PretrainedConfig

    changes: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            changes[key] = _small(value)
    for key in {**SIZES, **getattr(config, "attribute_map", {})}:
        name = getattr(config, "attribute_map", {}).get(key, key)
        now = getattr(config, name, None)
        size = SIZES.get(name, SIZES.get(key))
        if isinstance(now, int) and not isinstance(now, bool) and size is not None and now > 1:
            changes[name] = min(now, size)
        elif name in ("num_key_value_heads", "head_dim") and now is None and hasattr(config, name):
            changes[name] = None
    for key in TOKENS:
        if isinstance(getattr(config, key, None), int) and getattr(config, key) >= 60:
            changes[key] = 3
    changes |= _one_layer_of_each(getattr(config, "layer_types", None))
    return changes


def _one_layer_of_each(kinds: Any) -> dict[str, Any]:
    if not isinstance(kinds, list) or not kinds:
        return {}
    kinds = list(dict.fromkeys(kinds))
    depth = max(2, len(kinds))
    return {"layer_types": (kinds * depth)[:depth], "num_hidden_layers": depth}


def _parts(config: Any) -> list[Any]:
    from transformers import PretrainedConfig

    inside = [v for v in vars(config).values() if isinstance(v, PretrainedConfig)]
    return [config, *(p for part in inside for p in _parts(part))]


def _with_common(config: Any) -> Any:
    for part in _parts(config):
        part._attn_implementation = "eager"
        if hasattr(part, "use_cache"):
            part.use_cache = False
        for key, token in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
            if getattr(part, key, None) is None:
                setattr(part, key, token)
    return config


def _by_signature(model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Inputs that the names of a forward's arguments suggest, the likeliest first."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    vocabulary = min(
        (p.vocab_size for p in _parts(config) if isinstance(getattr(p, "vocab_size", None), int)),
        default=50,
    )

    def tokens() -> torch.Tensor:
        return torch.randint(4, max(5, vocabulary), (batch, length))

    decoder = {"decoder_input_ids": tokens()} if "decoder_input_ids" in names else {}
    text = {"input_ids": tokens(), **decoder}
    pixels = [{"pixel_values": x} for x in _pictures(config, batch)]
    if "input_ids" in names and "pixel_values" in names:
        yield from ({**text, **p} for p in pixels)
    if "input_ids" in names:
        yield text
    if "pixel_values" in names:
        yield from pixels
    if "input_values" in names:
        yield {"input_values": torch.randn(batch, 160 * length), **decoder}
        yield {"input_values": torch.randn(batch, 128, 128), **decoder}
    if "input_features" in names:
        bins = next(
            (
                getattr(config, n)
                for n in ("num_mel_bins", "input_feat_per_channel")
                if hasattr(config, n)
            ),
            80,
        )
        yield {"input_features": torch.randn(batch, bins, 80), **decoder}
        yield {"input_features": torch.randn(batch, 80, bins), **decoder}
    if "past_values" in names:
        channels = getattr(config, "num_input_channels", 1)
        yield {"past_values": torch.randn(batch, getattr(config, "context_length", 32), channels)}
        yield {"past_values": torch.randn(batch, getattr(config, "context_length", 32))}


def _pictures(config: Any, batch: int) -> Iterator[torch.Tensor]:
    parts = _parts(config)
    size = next((p.image_size for p in parts if getattr(p, "image_size", None)), 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = next(
        (p.num_channels for p in parts if isinstance(getattr(p, "num_channels", None), int)), 3
    )
    yield torch.randn(batch, channels, height, width)
    yield torch.randn(batch, channels, 64, 64)
    yield torch.randn(batch, 2, channels, height, width)
