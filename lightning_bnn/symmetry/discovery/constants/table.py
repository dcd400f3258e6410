"""The table of operations: what each does to constants that are added to its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_bnn.symmetry.discovery.constants.averages import (
    forgets,
    mean,
    norm_of_batch,
    norm_of_groups,
    norm_of_instances,
    norm_of_rows,
    pooled,
    total,
)
from lightning_bnn.symmetry.discovery.constants.layers import (
    addmm,
    convolution,
    embedding,
    linear,
)
from lightning_bnn.symmetry.discovery.constants.products import (
    attention,
    einsum,
    matmul,
    sum_with_product,
)
from lightning_bnn.symmetry.discovery.constants.sequences import cell, sequence
from lightning_bnn.symmetry.discovery.constants.shapes import (
    expanded,
    joined,
    padded,
    picked,
    rearranged,
    unchanged,
)
from lightning_bnn.symmetry.discovery.constants.sums import (
    add,
    dropout,
    masked,
    multiplied,
    negated,
    softmax,
    where,
)
from lightning_bnn.symmetry.rules import shape as channel_shapes
from lightning_bnn.symmetry.rules.table import RULES as CHANNEL_RULES

__all__ = ["RULES"]

Rule = Callable[..., Any]
_SHAPES = {
    name
    for name, rule in CHANNEL_RULES.items()
    if rule in (channel_shapes.rearrange, channel_shapes.cut)
}
_POOLS = {
    name for name in CHANNEL_RULES if "pool" in name or name.startswith(("upsample_", "_upsample_"))
}
_NORMS = (
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_native_batch_norm_legit"
)
_ROWS: tuple[tuple[str, Rule], ...] = (
    (" ".join(_SHAPES - {"rot90"}), rearranged),
    ("repeat tile repeat_interleave", rearranged),
    ("expand expand_as broadcast_to", expanded),
    ("cat concat concatenate stack", joined),
    ("pad constant_pad_nd", padded),
    ("index index_select", picked),
    ("to _to_copy type_as lift_fresh real positive", unchanged),
    ("dropout feature_dropout", dropout),
    ("add sub subtract", add),
    ("neg", negated),
    ("mul multiply div divide true_divide", multiplied),
    ("softmax _softmax log_softmax _log_softmax", softmax),
    ("masked_fill", masked),
    ("where", where),
    ("mean amax amin max min", mean),
    ("sum", total),
    ("var std", forgets),
    (" ".join(_POOLS), pooled),
    ("layer_norm rms_norm", norm_of_rows),
    ("group_norm", norm_of_groups),
    (_NORMS, norm_of_batch),
    ("instance_norm", norm_of_instances),
    ("linear", linear),
    ("addmm", addmm),
    ("matmul mm bmm", matmul),
    ("baddbmm", sum_with_product),
    ("einsum", einsum),
    ("embedding", embedding),
    ("conv1d conv2d conv3d", convolution),
    ("scaled_dot_product_attention", attention),
    ("lstm rnn_tanh rnn_relu", sequence()),
    ("gru", sequence(one_gate_apart=True)),
    ("lstm_cell rnn_tanh_cell rnn_relu_cell", cell()),
    ("gru_cell", cell(one_gate_apart=True)),
)
RULES: dict[str, Rule] = {name: rule for names, rule in _ROWS for name in names.split()}
"""By operation; what has no rule sees what is added to its operands."""
