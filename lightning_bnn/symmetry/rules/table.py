"""The table of operations: by name, without the in-place underscore, the rule of each.

A rule is called as ``rule(system, node, *args, **kwargs)`` with `Value`, `Weight` and `Constant` in
place of tensors. It states on ``system`` which channels are tied, which scales and signs pass, and
returns the labels of the result. What a rule does not cover it leaves by raising `Unsupported`:
everything that the operation touches is then held fixed.
"""

from __future__ import annotations

from lightning_bnn.symmetry.rules.arithmetic import (
    add,
    compare,
    divide,
    extreme,
    masked_fill,
    multiply,
    softmax,
    where,
)
from lightning_bnn.symmetry.rules.constraints import Rule
from lightning_bnn.symmetry.rules.elementwise import (
    absolute,
    alpha_dropout,
    bernoulli,
    cast,
    clamp,
    clamp_max,
    even,
    glu,
    hardtanh,
    homogeneous,
    native_dropout,
    nonlinear,
    odd,
    passthrough,
    power,
    prelu,
    threshold,
)
from lightning_bnn.symmetry.rules.layer import (
    addmm,
    baddbmm,
    convolution,
    einsum,
    embedding,
    linear,
    matmul,
)
from lightning_bnn.symmetry.rules.norm import batch_norm, group_norm, layer_norm, rms_norm
from lightning_bnn.symmetry.rules.reduction import (
    extreme_with_index,
    norm,
    pool,
    reduction,
    variance,
)
from lightning_bnn.symmetry.rules.sequence import attention, recurrent
from lightning_bnn.symmetry.rules.shape import (
    concatenate,
    copy,
    expand,
    pad,
    rearrange,
    scatter_slice,
    stack,
    uniform_like,
)

__all__ = [
    "ALLOCATIONS",
    "BROADCASTING",
    "KEEP_LOGITS",
    "KEEP_NOISE",
    "MEET_NOISE",
    "RULES",
    "UNIFORM",
    "WITHOUT_VALUE",
    "rules_of",
]

_ROWS: tuple[tuple[str, Rule], ...] = (
    # ------------------------------------------------------------ element-wise, one operand
    ("dropout feature_dropout neg real positive lift_fresh", passthrough),
    ("relu leaky_relu rrelu", homogeneous),
    ("tanh sin asin atan sinh asinh atanh erf tan hardshrink softshrink sign round", odd),
    ("trunc tanhshrink softsign", odd),
    ("cos cosh square", even),
    ("abs", absolute),
    ("gelu silu sigmoid hardswish hardsigmoid elu selu celu softplus mish relu6", nonlinear),
    ("exp exp2 expm1 log_sigmoid log log2 log10 log1p sqrt rsqrt reciprocal erfc", nonlinear),
    ("lgamma digamma floor ceil acos logit frac nan_to_num", nonlinear),
    ("bitwise_not logical_not isnan isinf isfinite", nonlinear),
    ("pow", power),
    ("clamp clamp_min", clamp),
    ("clamp_max", clamp_max),
    ("hardtanh", hardtanh),
    ("threshold", threshold),
    ("prelu", prelu),
    ("glu", glu),
    ("to _to_copy type_as", cast),
    ("native_dropout", native_dropout),
    ("alpha_dropout feature_alpha_dropout", alpha_dropout),
    ("bernoulli", bernoulli),
    # ------------------------------------------------------------ element-wise, several operands
    ("add sub subtract rsub", add),
    ("mul multiply", multiply),
    ("div divide true_divide", divide),
    ("maximum minimum fmax fmin", extreme),
    ("gt lt ge le eq ne", compare),
    ("where", where),
    ("masked_fill", masked_fill),
    ("softmax _softmax log_softmax _log_softmax", softmax),
    # ------------------------------------------------------------ shape
    ("view reshape flatten ravel unflatten _unsafe_view view_copy _reshape_alias", rearrange),
    ("view_as atleast_1d atleast_2d atleast_3d squeeze unsqueeze", rearrange),
    ("permute transpose t numpy_T mT mH adjoint movedim moveaxis", rearrange),
    ("swapaxes swapdims rot90 flip roll", rearrange),
    ("select slice narrow index index_select diagonal unfold", rearrange),
    ("chunk split split_with_sizes unbind tensor_split hsplit vsplit", rearrange),
    ("repeat repeat_interleave tile", rearrange),
    ("pixel_shuffle pixel_unshuffle channel_shuffle", rearrange),
    ("contiguous clone alias detach lift_fresh_copy", rearrange),
    ("expand expand_as broadcast_to", expand),
    ("cat concat concatenate", concatenate),
    ("stack", stack),
    ("slice_scatter select_scatter", scatter_slice),
    ("copy", copy),
    ("pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d", pad),
    ("zeros_like ones_like full_like new_zeros new_ones new_full zero", uniform_like),
    # ------------------------------------------------------------ reductions, pooling, resampling
    ("mean sum nanmean nansum", reduction(scale="passes", sign="passes")),
    ("amax amin", reduction(scale="passes", sign="stops")),
    ("logsumexp", reduction(scale="stops", sign="stops")),
    ("max min", extreme_with_index),
    ("var std var_mean std_mean", variance),
    ("linalg_vector_norm norm", norm),
    *((f"max_pool{d}d max_pool{d}d_with_indices", pool(d)) for d in (1, 2, 3)),
    *((f"adaptive_max_pool{d}d avg_pool{d}d adaptive_avg_pool{d}d", pool(d)) for d in (1, 2, 3)),
    *((f"_adaptive_avg_pool{d}d", pool(d)) for d in (1, 2, 3)),
    *((f"upsample_nearest{d}d _upsample_nearest_exact{d}d", pool(d)) for d in (1, 2, 3)),
    ("upsample_linear1d", pool(1)),
    ("upsample_bilinear2d upsample_bicubic2d", pool(2)),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", pool(2)),
    ("upsample_trilinear3d", pool(3)),
    # ------------------------------------------------------------ normalisations
    ("instance_norm", batch_norm("carrier")),
    ("layer_norm", layer_norm),
    ("rms_norm", rms_norm),
    ("group_norm", group_norm),
    # ------------------------------------------------------------ layers
    ("linear", linear),
    ("addmm", addmm),
    ("matmul mm bmm", matmul),
    ("baddbmm", baddbmm),
    ("einsum", einsum),
    ("embedding", embedding),
    ("conv1d conv2d conv3d", convolution()),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", convolution(transposed=True)),
    # ------------------------------------------------------------ sequences
    ("lstm", recurrent([False, False, True, False], has_cell=True)),
    ("gru", recurrent([False, False, True])),
    ("rnn_tanh", recurrent([True])),
    ("rnn_relu", recurrent([True], homogeneous=True)),
    ("scaled_dot_product_attention", attention),
)
_BATCH_NORMS = (
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_native_batch_norm_legit"
)


def rules_of(batch_norm_mode: str) -> dict[str, Rule]:
    """The rule of every operation, for one of the two conventions about batch norm."""
    rows = (*_ROWS, (_BATCH_NORMS, batch_norm(batch_norm_mode)))
    return {name: rule for names, rule in rows for name in names.split()}


RULES = rules_of("carrier")

# ------------------------------------------------------------ what needs no rule, or more than one
WITHOUT_VALUE = frozenset(
    "_assert_tensor_metadata _assert_scalar sym_size sym_constrain_range_for_size".split()
)
"""Checks and sizes: they compute no tensor."""
ALLOCATIONS = frozenset("empty new_empty empty_like rand_like randn_like randint_like".split())
"""Tensors of which only the shape counts: what is in an empty one is written over."""
UNIFORM = frozenset(name for name, rule in RULES.items() if rule is uniform_like)
"""One value everywhere, whatever the operand holds."""
BROADCASTING = frozenset(
    "add sub mul div maximum minimum where masked_fill gt lt ge le eq ne clamp_min clamp_max clamp "
    "relu sigmoid tanh exp sqrt rsqrt reciprocal neg pow".split()
)
"""Their rules take operands of size 1 along broadcast dimensions; others get the full size."""
MEET_NOISE = frozenset("add sub subtract rsub mul multiply where masked_fill".split())
"""Their rules know what to do with independent draws."""
KEEP_NOISE = frozenset(
    "add sub rsub mul div neg lt le gt ge eq ne clamp clamp_min clamp_max floor logical_not "
    "bitwise_not to _to_copy type_as exp log sqrt pow abs sign".split()
)
"""Of draws and of one number they compute independent draws of one law."""
KEEP_LOGITS = frozenset(
    "view reshape flatten squeeze dropout softmax log_softmax contiguous clone alias".split()
)
"""What may follow the layer that writes the logits without a change of its symmetry."""
