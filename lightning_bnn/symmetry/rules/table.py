"""The table of operations: by name, without the in-place underscore, the rule of each.

A rule is called as ``rule(system, node, *args, **kwargs)`` with `Value`, `Weight` and `Constant` in
place of tensors. It states on ``system`` which channels are tied, which scales and signs pass, and
returns the labels of the result. What a rule does not cover it leaves by raising `Unsupported`:
everything that the operation touches is then held fixed.
"""

from __future__ import annotations

from lightning_bnn.symmetry.rules import (
    arithmetic,
    attention,
    chosen,
    contraction,
    elementwise,
    gathered,
    indexing,
    layer,
    norm,
    recurrence,
    reduction,
    repetition,
    running,
    shape,
    sorted_rows,
    weight_products,
)
from lightning_bnn.symmetry.rules.constraints import Rule

__all__ = [
    "ALLOCATIONS",
    "BROADCASTING",
    "EXPANDING",
    "INDEX_SHAPES",
    "KEEP_LOGITS",
    "JOINS",
    "KEEP_NOISE",
    "MARK_PARTS",
    "MIXES",
    "MULTIPLIES",
    "OF_WEIGHTS",
    "ACCEPT_NOISE",
    "RESHAPING",
    "RULES",
    "TAKE_INDICES",
    "TAKE_WEIGHTS",
    "UNIFORM",
    "WITHOUT_VALUE",
    "rules_of",
]

_ROWS: tuple[tuple[str, Rule], ...] = (
    # ------------------------------------------------------------ element-wise, one operand
    ("neg real positive lift_fresh", elementwise.passthrough),
    ("dropout feature_dropout", elementwise.dropout),
    ("relu leaky_relu rrelu", elementwise.homogeneous),
    ("tanh sin asin atan sinh asinh atanh erf tan", elementwise.odd),
    ("hardshrink softshrink tanhshrink softsign sign round trunc", elementwise.odd),
    ("cos cosh", elementwise.even),
    ("square", elementwise.squares),
    ("abs", elementwise.absolute),
    ("gelu silu sigmoid hardswish hardsigmoid elu selu celu", elementwise.nonlinear),
    ("softplus mish relu6 log_sigmoid logit", elementwise.nonlinear),
    ("exp exp2 expm1 log log2 log10 log1p reciprocal", elementwise.nonlinear),
    ("sqrt", elementwise.root),
    ("rsqrt", elementwise.inverse_root),
    ("erfc lgamma digamma acos floor ceil frac nan_to_num", elementwise.nonlinear),
    ("bitwise_not logical_not isnan isinf isfinite", elementwise.nonlinear),
    ("pow", elementwise.power),
    ("clamp clamp_min", elementwise.clamp),
    ("clamp_max", elementwise.clamp_max),
    ("hardtanh", elementwise.hardtanh),
    ("threshold", elementwise.threshold),
    ("prelu", elementwise.prelu),
    ("glu", elementwise.glu),
    ("to _to_copy type_as", elementwise.cast),
    ("native_dropout", elementwise.native_dropout),
    ("alpha_dropout feature_alpha_dropout", elementwise.alpha_dropout),
    ("bernoulli", elementwise.bernoulli),
    # ------------------------------------------------------------ element-wise, several operands
    ("add sub subtract rsub", arithmetic.add),
    ("mul multiply", arithmetic.multiply),
    ("div divide true_divide", arithmetic.divide),
    ("maximum minimum fmax fmin", arithmetic.extreme),
    ("gt lt ge le eq ne", arithmetic.compare),
    ("addcmul", arithmetic.add_product),
    ("addcdiv", arithmetic.add_quotient),
    ("lerp", arithmetic.lerp),
    ("atan2 fmod remainder floor_divide logaddexp hypot copysign", arithmetic.combine),
    ("logical_and logical_or logical_xor", arithmetic.combine),
    ("bitwise_and bitwise_or bitwise_xor", arithmetic.combine),
    ("where", arithmetic.where),
    ("masked_fill", arithmetic.masked_fill),
    ("softmax _softmax log_softmax _log_softmax", arithmetic.softmax),
    # ------------------------------------------------------------ shape
    ("view reshape flatten ravel unflatten _unsafe_view view_copy _reshape_alias", shape.rearrange),
    ("view_as reshape_as atleast_1d atleast_2d atleast_3d squeeze unsqueeze", shape.rearrange),
    ("permute transpose t numpy_T mT mH adjoint movedim moveaxis", shape.rearrange),
    ("swapaxes swapdims rot90 flip roll", shape.rearrange),
    ("select narrow diagonal unfold", shape.rearrange),
    ("slice", shape.cut),
    ("chunk split split_with_sizes unbind tensor_split hsplit vsplit", shape.rearrange),
    ("repeat tile", repetition.repeat),
    ("repeat_interleave", repetition.repeat_interleave),
    ("pixel_shuffle pixel_unshuffle channel_shuffle", shape.rearrange),
    ("contiguous clone alias detach lift_fresh_copy resolve_conj", shape.rearrange),
    ("view_as_complex", shape.view_as_complex),
    ("view_as_real", shape.view_as_real),
    ("expand expand_as broadcast_to", shape.expand),
    ("cat concat concatenate", shape.concatenate),
    ("stack", shape.stack),
    ("slice_scatter select_scatter", shape.scatter_slice),
    ("copy", shape.copy),
    ("pad constant_pad_nd", shape.pad),
    *((f"reflection_pad{d}d replication_pad{d}d", shape.pad) for d in (1, 2, 3)),
    ("zeros_like ones_like full_like new_zeros new_ones new_full zero", shape.uniform_like),
    ("as_strided", running.strided),
    # ------------------------------------------------------------ along tokens and space
    ("cumsum", running.cumulative_sum),
    ("cumprod logcumsumexp", running.cumulative_product),
    ("cummax cummin", running.cumulative_extreme),
    ("sort", running.sort),
    ("argsort", running.argsort),
    ("tril triu", running.triangle),
    ("im2col", running.im2col),
    ("col2im", running.col2im),
    ("masked_scatter", running.masked_scatter),
    # ------------------------------------------------------------ indices
    ("index index_select", indexing.index),
    ("gather", indexing.gather),
    ("take_along_dim", indexing.take_along_dim),
    ("scatter scatter_add scatter_reduce index_add index_copy index_reduce", indexing.scatter),
    ("index_put _index_put", indexing.index_put),
    ("embedding_bag _embedding_bag _embedding_bag_forward_only", indexing.embedding_bag),
    ("topk", chosen.topk),
    ("argmax argmin", chosen.argmax),
    ("one_hot", chosen.one_hot),
    ("histc", chosen.count_index),
    # ------------------------------------------------------------ reductions, pooling, resampling
    ("mean sum nanmean nansum", reduction.reduction(scale="passes", sign="passes")),
    ("amax amin", reduction.reduction(scale="passes", sign="stops")),
    ("logsumexp", reduction.reduction(scale="stops", sign="stops")),
    ("prod any all count_nonzero", reduction.reduction(scale="stops", sign="stops")),
    ("max min", arithmetic.largest),
    ("median nanmedian", chosen.extreme_with_index),
    ("var std var_mean std_mean", reduction.variance),
    ("linalg_vector_norm norm", reduction.norm),
    *((f"max_pool{d}d max_pool{d}d_with_indices", reduction.pool(d)) for d in (1, 2, 3)),
    *((f"avg_pool{d}d adaptive_max_pool{d}d", reduction.pool(d)) for d in (1, 2, 3)),
    *((f"adaptive_avg_pool{d}d _adaptive_avg_pool{d}d", reduction.pool(d)) for d in (1, 2, 3)),
    *((f"upsample_nearest{d}d", reduction.pool(d)) for d in (1, 2, 3)),
    *((f"_upsample_nearest_exact{d}d", reduction.pool(d)) for d in (1, 2, 3)),
    ("upsample_linear1d", reduction.pool(1)),
    ("upsample_bilinear2d upsample_bicubic2d", reduction.pool(2)),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", reduction.pool(2)),
    ("upsample_trilinear3d", reduction.pool(3)),
    # ------------------------------------------------------------ normalisations
    ("instance_norm", norm.batch_norm("carrier")),
    ("layer_norm", norm.layer_norm),
    ("rms_norm", norm.rms_norm),
    ("group_norm", norm.group_norm),
    # ------------------------------------------------------------ layers
    ("linear", layer.linear),
    ("addmm", layer.addmm),
    *(
        _CONTRACTIONS := (
            ("matmul mm bmm mv", contraction.matmul),
            ("dot vdot inner", contraction.dot),
            ("outer ger", contraction.outer),
            ("einsum", contraction.einsum),
        )
    ),
    ("baddbmm", contraction.baddbmm),
    ("_grouped_mm transformers.grouped_mm_fallback", sorted_rows.grouped_mm),
    ("embedding", layer.embedding),
    ("conv1d conv2d conv3d", layer.convolution()),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", layer.convolution(transposed=True)),
    # ------------------------------------------------------------ sequences
    ("lstm", recurrence.LSTM.sequence),
    ("gru", recurrence.GRU.sequence),
    ("rnn_tanh", recurrence.TANH_RNN.sequence),
    ("rnn_relu", recurrence.RELU_RNN.sequence),
    ("lstm_cell", recurrence.LSTM.step),
    ("gru_cell", recurrence.GRU.step),
    ("rnn_tanh_cell", recurrence.TANH_RNN.step),
    ("rnn_relu_cell", recurrence.RELU_RNN.step),
    ("scaled_dot_product_attention", attention.attention),
)
_BATCH_NORMS = (
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_native_batch_norm_legit"
)
_OF_WEIGHTS: tuple[tuple[str, Rule], ...] = (
    *_CONTRACTIONS,
    ("add sub subtract rsub", weight_products.add),
    ("mul multiply", weight_products.multiply),
    ("div divide true_divide", weight_products.divide),
    ("mean sum", weight_products.reduction),
    ("cumsum", weight_products.running_sum),
    ("norm linalg_vector_norm var std var_mean std_mean amax amin", weight_products.norm),
    ("softmax _softmax log_softmax _log_softmax", weight_products.softmax),
    ("batch_norm _native_batch_norm_legit", weight_products.batch_norm),
    ("_weight_norm _weight_norm_interface", weight_products.weight_norm),
)
_SHAPES = (
    *(shape.rearrange, shape.cut, shape.expand),
    *(repetition.repeat, repetition.repeat_interleave),
)
_POINTWISE = (
    *(elementwise.passthrough, elementwise.homogeneous, elementwise.odd, elementwise.nonlinear),
    *(elementwise.even, elementwise.absolute, elementwise.power, elementwise.clamp),
    *(elementwise.clamp_max, elementwise.cast, elementwise.root, elementwise.inverse_root),
)


def rules_of(batch_norm_mode: str) -> dict[str, Rule]:
    """The rule of every operation, for one of the two conventions about batch norm."""
    rows = (*_ROWS, (_BATCH_NORMS, norm.batch_norm(batch_norm_mode)))
    return {name: rule for names, rule in rows for name in names.split()}


RULES = rules_of("carrier")
INDEX_SHAPES = frozenset(name for name, rule in RULES.items() if rule in _SHAPES)
"""Of an index among channels they compute such an index."""
TAKE_INDICES = frozenset(
    "gather take_along_dim scatter one_hot index index_select eq sort histc cumsum to _to_copy "
    "type_as _grouped_mm transformers.grouped_mm_fallback".split()
)
"""Their rules know indices among channels, and counts; to all others these are held fixed."""
OF_WEIGHTS: dict[str, Rule] = {
    **{name: weight_products.reshape for name, rule in RULES.items() if rule in _SHAPES},
    **{name: weight_products.each_part(r) for name, r in RULES.items() if r in _POINTWISE},
    **{name: rule for names, rule in _OF_WEIGHTS for name in names.split()},
}
"""The rules of weights that are computed from weights, where no activation takes part."""
OF_ROWS: dict[str, Rule] = {
    **{name: gathered.moved_rows for name, rule in RULES.items() if rule in _SHAPES[:2]},
    **{name: gathered.each_row(r) for name, r in RULES.items() if r in _POINTWISE},
    **{name: gathered.along_row(RULES[name]) for name in "glu softmax _softmax".split()},
    **{name: gathered.each_row(RULES[name]) for name in ("dropout", "feature_dropout")},
    **dict.fromkeys("add sub subtract rsub".split(), gathered.sum_of_rows),
    **dict.fromkeys("mul multiply".split(), gathered.times_rows()),
    **dict.fromkeys("div divide true_divide".split(), gathered.times_rows(inverse=True)),
    **{name: RULES[name] for name in "matmul mm bmm einsum".split()},
    **{name: RULES[name] for name in ("_grouped_mm", "transformers.grouped_mm_fallback")},
}
"""The rules of what an index among channels picks from a stack, row by row."""
MARK_PARTS = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide mean sum cumsum "
    "norm linalg_vector_norm var std var_mean std_mean amax amin square pow "
    "batch_norm _native_batch_norm_legit _weight_norm _weight_norm_interface".split()
) | {
    name
    for name, rule in OF_WEIGHTS.items()
    if rule is weight_products.reshape or rule in [r for _, r in _CONTRACTIONS]
}
"""Their rules say of every part what keeps it from being mixed; after others no part mixes."""
TAKE_WEIGHTS = frozenset(
    "linear addmm matmul mm bmm mv dot vdot inner outer ger einsum baddbmm embedding conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
"""Their rules take computed weights beside activations; others see one part of them."""

MULTIPLIES = TAKE_WEIGHTS | frozenset("mul multiply div divide true_divide".split())
"""Their results are products of their operands, or sums of these."""

# ------------------------------------------------------------ what needs no rule, or more than one
WITHOUT_VALUE = frozenset(
    "_assert_tensor_metadata _assert_scalar sym_size sym_constrain_range_for_size".split()
)
"""Checks and sizes: they compute no tensor."""
ALLOCATIONS = frozenset("empty new_empty empty_like rand_like randn_like randint_like".split())
"""Tensors of which only the shape counts: what is in an empty one is written over."""
UNIFORM = frozenset(name for name, rule in RULES.items() if rule is shape.uniform_like)
"""One value everywhere, whatever the operand holds."""
EXPANDING = frozenset("expand expand_as broadcast_to repeat".split())
"""What they copy stays visible as such, even where no symmetry moves it."""
BROADCASTING = frozenset(
    "add sub mul div maximum minimum where masked_fill gt lt ge le eq ne clamp_min clamp_max clamp "
    "relu sigmoid tanh exp sqrt rsqrt reciprocal neg pow clone contiguous alias transpose permute "
    "mT mH adjoint movedim moveaxis swapaxes swapdims unsqueeze masked_scatter matmul mm bmm mv "
    "einsum baddbmm scaled_dot_product_attention addcmul addcdiv lerp "
    "gather take_along_dim scatter scatter_add scatter_reduce index_put _index_put".split()
)
"""Their rules take operands of size 1 along broadcast dimensions; others get the full size."""
RESHAPING = frozenset("view reshape _unsafe_view flatten ravel".split())
"""Of operands of size 1 along broadcast dimensions they make copies."""
ACCEPT_NOISE = frozenset("add sub subtract rsub mul multiply where masked_fill".split())
"""Their rules know what to do with independent draws."""
KEEP_NOISE = frozenset(
    "add sub rsub mul div neg lt le gt ge eq ne clamp clamp_min clamp_max floor logical_not "
    "bitwise_not to _to_copy type_as exp log sqrt pow abs sign".split()
)
"""Of draws and of one number they compute independent draws of one law."""
JOINS = frozenset("cat concat concatenate stack".split())
"""Their operands stand side by side; zeros beside an input stay what they are there."""
MIXES = frozenset(
    "neg real positive lift_fresh dropout feature_dropout alpha_dropout feature_alpha_dropout "
    "to _to_copy type_as square pow "
    "add sub subtract rsub mul multiply div divide true_divide mean sum linalg_vector_norm norm "
    "layer_norm rms_norm group_norm var std var_mean std_mean linear addmm matmul mm bmm mv dot "
    "vdot inner outer ger baddbmm einsum embedding _grouped_mm "
    "transformers.grouped_mm_fallback "
    "addcmul addcdiv lerp where masked_fill cumsum tril triu im2col col2im masked_scatter "
    "index index_select embedding_bag _embedding_bag _embedding_bag_forward_only gather "
    "take_along_dim scatter scatter_add scatter_reduce index_add index_copy index_reduce "
    "index_put _index_put lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention pad constant_pad_nd expand expand_as broadcast_to "
    "view_as_complex view_as_real cat concat concatenate stack "
    "slice_scatter select_scatter copy repeat repeat_interleave tile".split()
) | {
    name
    for name, rule in RULES.items()
    if rule in (shape.rearrange, shape.cut, shape.uniform_like, shape.pad)
    or "pool" in name
    or "upsample" in name
}
"""Their rules say themselves which channels they keep from being mixed; after others none mix."""
KEEP_LOGITS = frozenset(
    "view reshape flatten squeeze dropout softmax log_softmax contiguous clone alias".split()
)
"""What may follow the layer that writes the logits without a change of its symmetry."""
