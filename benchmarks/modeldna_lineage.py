"""modelDNA on the attacked Llamas of `bnn-research lineage` (`pip install modeldna` first).

    python benchmarks/modeldna_lineage.py FOLDER [WIDTH]

Networks are written to the folder as those of Hugging Face.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modeldna.scan import compare_pair
from safetensors.torch import save_file
from torch import Tensor

from bnn_research.families import ATTACKS, SCALES, Bases, family
from bnn_research.lineage import auc, true_positives
from weightsym import params as P

NAMES = {
    "embed": "model.embed_tokens", "last": "model.norm", "head": "lm_head",
    "before": "input_layernorm", "after": "post_attention_layernorm",
    **{n: f"self_attn.{n}_proj" for n in "qkvo"},
    **{n: f"mlp.{n}_proj" for n in ("gate", "up", "down")},
}  # fmt: skip


def written(params: Mapping[str, Tensor], folder: Path) -> str:
    """Write a network as a Llama of Hugging Face, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict[str, Tensor]()
    for name, w in params.items():
        *layer, part, kind = name.split(".")
        parts = ["model", *layer, NAMES[part], kind] if layer else [NAMES[part], kind]
        named[".".join(parts)] = w.detach().clone().contiguous()
    save_file(named, str(folder / "model.safetensors"), {"format": "pt"})
    hidden, width = named["model.layers.0.mlp.up_proj.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": len(named["lm_head.weight"]),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def probability(suspect: str, parent: str) -> float:
    """What modelDNA says from all weights."""
    return float(compare_pair(suspect, parent, mode="full")[3].probability)


def main(folder: Path, width: int = 32) -> None:
    """Print the share of children above all independent pairs, attack by attack."""
    settings = replace(SCALES["small"], width=width)
    bases = Bases.of(family("Llama", settings), settings, 0)
    parents = [written(P.of(net), folder / str(k)) for k, net in enumerate(bases.networks)]
    negatives = [probability(b, a) for a, b in itertools.combinations(parents, 2)]
    print(f"{len(negatives)} independent pairs: at most {max(negatives):.2f}")
    children = list(bases.children().values())
    for attack in ATTACKS:
        attacked = bases.attacked(children, [attack] * len(children))
        found = [probability(written(w, folder / "suspect"), parents[0]) for w in attacked]
        rates = auc(found, negatives), true_positives(found, negatives)
        print(f"{attack}: AUC {rates[0]:.2f}, {rates[1]:.0f} % found, {min(found):.2f} at least")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
