"""Score functions, which map a router's logits to scores, in PyTorch and for Triton kernels.

    softmax        over the experts of a token
    sigmoid        of each logit
    sqrtsoftplus   sqrt(log(1 + exp(x))) of each logit x (DeepSeek-V4)

Letters: T tokens, E experts.

Note [same bits]. Equal logits of a row must get equal scores in every lane, and a recorded choice
must get its recorded weights from every kernel. So kernels of `route` are launched with
enable_fp_fusion=False: if the compiler fused a product into the sum after it, two lanes that add
their terms would round different terms. And `sum_rows` sums in the order (x0 + x1) + (x2 + x3),
because the order of tl.sum follows layout and alignment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.triton_api import tl, triton

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def compute_scores_ref(logits_TE: Tensor, score_function: str) -> Tensor:
    """Return the scores [T, E] of fp32 or fp64 logits, in their dtype; differentiable."""
    if score_function == "softmax":
        return logits_TE.softmax(-1)
    if score_function == "sigmoid":
        return logits_TE.sigmoid()
    # Below `low`, softplus(x) is exp(x) to the last bit. The clamps keep the values and gradients
    # of the branch that is not selected finite.
    low = -40.0 if logits_TE.dtype == torch.float64 else -20.0
    softplus_TE = -F.logsigmoid(-logits_TE.clamp(min=low))
    tail_TE = (logits_TE.clamp(max=low) / 2).exp()
    return torch.where(logits_TE < low, tail_TE, softplus_TE.sqrt())


@triton.jit
def sum_rows(x):
    """Return sums of rows, [rows, 1], in an order that gives the same bits in every kernel."""
    if x.shape[1] > 1:
        x = sum_rows(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2))
    return x


@triton.jit
def compute_exp(x):
    """Return e^x for x <= 200, with an error of 2 to 3 ulp."""
    # exp(-200) is 0 in fp32; the clamp keeps -inf out of the error term, and lets a NaN through.
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * 1.4426950216293335
    error = tl.fma(x, 1.9259629911266175e-08, tl.fma(x, 1.4426950216293335, -y))
    return tl.exp2(y) * (1.0 + error * 0.6931471805599453)


@triton.jit
def compute_sqrtsoftplus(x):
    """Return sqrt(softplus(x)) and its derivative with respect to x."""
    # With h = exp(-|x| / 2), u = h^2 and r = log(1 + u) / u, which lies between log(2) and 1,
    # softplus(x) is u * r for x < 0 and x + u * r else. The square root of the first is h *
    # sqrt(r): neither exp(x) nor a logarithm near 1 is ever formed, so that score and slope keep
    # their digits down to exp(x / 2), where softplus in fp32 is 0 and its square root has no slope.
    h = compute_exp(-0.5 * tl.abs(x))
    u = h * h
    # log(1 + u) = 2 artanh(z), z = u / (2 + u) <= 1/3: eight terms of the series leave 2e-9.
    z = u / (2.0 + u)
    q = z * z
    series = 0.1111111111 + q * (0.09090909091 + q * (0.07692307692 + q * 0.06666666667))
    series = 1.0 + q * (0.3333333333 + q * (0.2 + q * (0.1428571429 + q * series)))
    r = 2.0 * series / (2.0 + u)
    root = tl.sqrt_rn(tl.where(x < 0.0, r, x + u * r))
    factor = tl.where(x < 0.0, h, 1.0)
    return factor * root, factor / (2.0 * (1.0 + u) * root)


@triton.jit
def compute_scores(logits, max_logit, inverse_exp_sum, FUNCTION: tl.constexpr):
    """Return the scores of fp32 logits, and their derivatives (for "softmax" the scores).

    Only "softmax" reads max_logit and inverse_exp_sum = 1 / sum(exp(logit - max_logit)), [rows, 1].
    """
    if FUNCTION == "sigmoid":
        # exp(89) is already inf, and its score 0.
        s = 1.0 / (1.0 + compute_exp(tl.minimum(-logits, 89.0, propagate_nan=tl.PropagateNan.ALL)))
        slope = s * (1.0 - s)
    elif FUNCTION == "sqrtsoftplus":
        s, slope = compute_sqrtsoftplus(logits)
    else:
        s = compute_exp(logits - max_logit) * inverse_exp_sum
        slope = s
    return s, slope


@triton.jit
def compute_scores_of_rows(logits, FUNCTION: tl.constexpr):
    """Return the scores of full rows, then max_logit and inverse_exp_sum (0 if unused)."""
    if FUNCTION != "softmax":
        top = tl.zeros([logits.shape[0], 1], dtype=tl.float32)
        factor = top
        scores, _ = compute_scores(logits, top, factor, FUNCTION)
    else:
        top = tl.max(logits, axis=1, keep_dims=True)
        exps = compute_exp(logits - top)
        factor = tl.div_rn(1.0, sum_rows(exps))
        scores = exps * factor
    return scores, top, factor


@triton.jit
def load_token_scores(
    logits_ptr,  # [T, E] fp32
    padding_ptr,  # [T] bool, or None
    num_tokens,
    FUNCTION: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    E_POW2: tl.constexpr,  # E up to a power of two
):
    """Return scores [tokens, experts], expert indices [1, experts] and token mask [tokens, 1]."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, E_POW2)[None, :]
    row_mask = rows < num_tokens
    mask = row_mask & (columns < E)
    logits = tl.load(logits_ptr + rows * E + columns, mask=mask, other=float("-inf"))
    scores, _, _ = compute_scores_of_rows(tl.where(row_mask, logits, 0.0), FUNCTION)
    if padding_ptr is not None:
        is_padding = tl.load(padding_ptr + rows, mask=row_mask, other=1)
        row_mask = row_mask & (is_padding.to(tl.int32) == 0)
    return scores, columns, row_mask
