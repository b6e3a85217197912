"""The kernels of `hyper_connections.py`. N_POW2 and M_POW2 are N and M padded to powers of two."""

from moecore.kernels.triton_api import tl, triton


@triton.jit
def _normalise(matrix, eps, is_real, AXIS: tl.constexpr):
    """Divide columns (AXIS 0) or rows (1) of a matrix by sum + eps; 0 where not `is_real`."""
    return tl.where(is_real, matrix / (tl.sum(matrix, AXIS, keep_dims=True) + eps), 0.0)


@triton.jit
def _normalise_bwd(d_normalised, normalised, matrix, eps, is_real, AXIS: tl.constexpr):
    """Return the gradient of `matrix` from `_normalise`'s; 0 where `is_real` is False."""
    d = (d_normalised - tl.sum(d_normalised * normalised, AXIS, keep_dims=True)) / (
        tl.sum(matrix, AXIS, keep_dims=True) + eps
    )
    return tl.where(is_real, d, 0.0)


@triton.jit
def _compute_logits(
    raw_ptr, base_ptr, scale_ptr, mix_ids, is_real, inverse_rms, GROUP: tl.constexpr
):
    """Return raw * inverse_rms * scale + base of a group of mixes: GROUP 0 pre, 1 post, 2 comb."""
    raw = tl.load(raw_ptr + mix_ids, mask=is_real, other=0.0)
    return raw * inverse_rms * tl.load(scale_ptr + GROUP) + tl.load(
        base_ptr + mix_ids, mask=is_real, other=0.0
    )


@triton.jit
def _compute_softmax(logits, columns, N: tl.constexpr):
    """Return the softmax of rows, over their first N columns; `columns` has the column indices."""
    logits = tl.where(columns[None, :] < N, logits, float("-inf"))
    e = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
    return e / tl.sum(e, 1, keep_dims=True)


@triton.jit
def collapse_streams_fwd_kernel(
    streams_ptr,  # [T, N, D]
    raw_ptr,  # fp32 [T, M]: mixes before the division by the root mean square
    base_ptr,  # fp32 [M]
    scale_ptr,  # fp32 [3]
    x_ptr,  # [T, D], out
    weights_ptr,  # fp32 [T, N + N * N], out
    r_ptr,  # fp32 [T], out: 1 / root mean square
    norm_eps,
    eps,
    iterations,
    N: tl.constexpr,
    D: tl.constexpr,
    N_POW2: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's sublayer input, its mixing weights, and its 1 / RMS."""
    t = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, N_POW2), tl.arange(0, BLOCK_D)
    row = streams_ptr + t * (N * D) + n[:, None] * D + d[None, :]
    squares = tl.zeros([N_POW2, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        mask = (n < N)[:, None] & (d < D - start)[None, :]
        s = tl.load(row + start, mask=mask, other=0.0).to(tl.float32)
        squares += s * s
    r = 1.0 / tl.sqrt(tl.sum(squares) / (N * D) + norm_eps)
    tl.store(r_ptr + t, r)
    raw_ptr += t * (2 * N + N * N)
    weights_ptr += t * (N + N * N)
    post = 2.0 * tl.sigmoid(_compute_logits(raw_ptr, base_ptr, scale_ptr, N + n, n < N, r, 1))
    tl.store(weights_ptr + n, post, mask=n < N)
    cells, real = n[:, None] * N + n[None, :], (n < N)[:, None] & (n < N)[None, :]
    logits = _compute_logits(raw_ptr, base_ptr, scale_ptr, 2 * N + cells, real, r, 2)
    comb = _normalise(tl.where(real, _compute_softmax(logits, n, N) + eps, 0.0), eps, real, 0)
    for _ in range(1, iterations):
        comb = _normalise(_normalise(comb, eps, real, 1), eps, real, 0)
    tl.store(weights_ptr + N + cells, comb, mask=real)
    pre = tl.sigmoid(_compute_logits(raw_ptr, base_ptr, scale_ptr, n, n < N, r, 0)) + eps
    for start in range(0, D, BLOCK_D):
        mask = (n < N)[:, None] & (d < D - start)[None, :]
        s = tl.load(row + start, mask=mask, other=0.0).to(tl.float32)
        x = tl.sum(pre[:, None] * s, 0).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + t * D + start + d, x, mask=d < D - start)


@triton.jit
def _differentiate_mixes(
    dlogits,
    raw_ptr,
    scale_ptr,
    draw_ptr,
    sums_ptr,
    mix_ids,
    is_real,
    inverse_rms,
    num_mixes,
    GROUP: tl.constexpr,
):
    """Store gradients of raw mixes, base and scale from dlogits; return the gradient of 1 / RMS."""
    raw = tl.load(raw_ptr + mix_ids, mask=is_real, other=0.0)
    dmixes = dlogits * tl.load(scale_ptr + GROUP)
    tl.store(draw_ptr + mix_ids, dmixes * inverse_rms, mask=is_real)
    tl.store(sums_ptr + mix_ids, dlogits, mask=is_real)
    tl.store(sums_ptr + num_mixes + mix_ids, dlogits * raw * inverse_rms, mask=is_real)
    return tl.sum(tl.where(is_real, dmixes * raw, 0.0))


@triton.jit
def collapse_streams_bwd_mixes_kernel(
    streams_ptr,  # [T, N, D]
    raw_ptr,  # fp32 [T, M]
    r_ptr,  # fp32 [T]
    base_ptr,  # fp32 [M]
    scale_ptr,  # fp32 [3]
    dx_ptr,  # [T, D]
    dweights_ptr,  # fp32 [T, N + N * N]
    iterates_ptr,  # fp32 [T, iterations - 1, N, N], written and read here
    pre_ptr,  # fp32 [T, N], out
    draw_ptr,  # fp32 [T, M], out
    factor_ptr,  # fp32 [T], out: the gradient of streams by way of r is streams times it
    sums_ptr,  # fp32 [T, 2, M], out: what a token adds to dbase, and by mix to dscale
    eps,
    iterations,
    N: tl.constexpr,
    D: tl.constexpr,
    N_POW2: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's gradients of mixes, base and scale, and factors of streams' gradients."""
    t = tl.program_id(0).to(tl.int64)
    M: tl.constexpr = 2 * N + N * N
    n, d = tl.arange(0, N_POW2), tl.arange(0, BLOCK_D)
    row = streams_ptr + t * (N * D) + n[:, None] * D + d[None, :]
    products = tl.zeros([N_POW2, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = d < D - start
        mask = (n < N)[:, None] & inside[None, :]
        s = tl.load(row + start, mask=mask, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + t * D + start + d, mask=inside, other=0.0).to(tl.float32)
        products += s * dx[None, :]
    r = tl.load(r_ptr + t)
    raw_ptr += t * M
    draw_ptr += t * M
    sums_ptr += t * (2 * M)
    dweights_ptr += t * (N + N * N)

    s = tl.sigmoid(_compute_logits(raw_ptr, base_ptr, scale_ptr, n, n < N, r, 0))
    tl.store(pre_ptr + t * N + n, s + eps, mask=n < N)
    dpre = tl.sum(products, 1) * s * (1.0 - s)
    dr = _differentiate_mixes(dpre, raw_ptr, scale_ptr, draw_ptr, sums_ptr, n, n < N, r, M, 0)

    s = tl.sigmoid(_compute_logits(raw_ptr, base_ptr, scale_ptr, N + n, n < N, r, 1))
    dpost = 2.0 * tl.load(dweights_ptr + n, mask=n < N, other=0.0) * s * (1.0 - s)
    dr += _differentiate_mixes(dpost, raw_ptr, scale_ptr, draw_ptr, sums_ptr, N + n, n < N, r, M, 1)

    cells, real = n[:, None] * N + n[None, :], (n < N)[:, None] & (n < N)[None, :]
    softmax = _compute_softmax(
        _compute_logits(raw_ptr, base_ptr, scale_ptr, 2 * N + cells, real, r, 2), n, N
    )
    start = tl.where(real, softmax + eps, 0.0)
    first = _normalise(start, eps, real, 0)
    iterate = iterates_ptr + t * (iterations - 1) * (N * N) + cells
    comb = first
    for i in range(iterations - 1):
        tl.store(iterate + i * (N * N), comb, mask=real)
        comb = _normalise(_normalise(comb, eps, real, 1), eps, real, 0)
    tl.debug_barrier()  # a thread may read what another thread has written
    dcomb = tl.load(dweights_ptr + N + cells, mask=real, other=0.0)
    for i in range(iterations - 1):
        comb = tl.load(iterate + (iterations - 2 - i) * (N * N), mask=real, other=0.0)
        rows = _normalise(comb, eps, real, 1)
        dcomb = _normalise_bwd(dcomb, _normalise(rows, eps, real, 0), rows, eps, real, 0)
        dcomb = _normalise_bwd(dcomb, rows, comb, eps, real, 1)
    dcomb = _normalise_bwd(dcomb, first, start, eps, real, 0)
    dcomb = softmax * (dcomb - tl.sum(dcomb * softmax, 1, keep_dims=True))
    dr += _differentiate_mixes(
        dcomb, raw_ptr, scale_ptr, draw_ptr, sums_ptr, 2 * N + cells, real, r, M, 2
    )
    tl.store(factor_ptr + t, -dr * r * r * r / (N * D))


@triton.jit(do_not_specialize=["num_tokens"])
def collapse_streams_bwd_kernel(
    streams_ptr,  # [T, N, D]
    fn_ptr,  # [M, C]
    dx_ptr,  # [T, D]
    dcarrier_ptr,  # [T, N, D]: the gradient of streams by way of `expand_streams`
    pre_ptr,  # fp32 [T, N]
    draw_ptr,  # fp32 [T, M]
    factor_ptr,  # fp32 [T]
    dstreams_ptr,  # [T, N, D], out
    num_tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    M_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the streams' gradient: BLOCK_D elements of one stream of BLOCK_T tokens."""
    C: tl.constexpr = N * D
    tiles: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile = tl.program_id(0) % (N * tiles)
    stream = tile // tiles
    d, m = (tile % tiles) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, M_POW2)
    t = (tl.program_id(0) // (N * tiles)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, in_d, in_m = t < num_tokens, (d < D)[None, :], m < M
    mask, columns = in_t[:, None] & in_d, (stream * D + d)[None, :]
    cells = t[:, None] * C + columns
    s = tl.load(streams_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    dx = tl.load(dx_ptr + t[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    ds = tl.load(factor_ptr + t, mask=in_t, other=0.0)[:, None] * s
    ds += tl.load(pre_ptr + t * N + stream, mask=in_t, other=0.0)[:, None] * dx
    ds += tl.load(dcarrier_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    in_draw = in_t[:, None] & in_m[None, :]
    draw = tl.load(draw_ptr + t[:, None] * M + m[None, :], mask=in_draw, other=0.0)
    fn = tl.load(fn_ptr + m[:, None] * C + columns, mask=in_m[:, None] & in_d, other=0.0)
    # Three products of parts, which have the error of fp32.
    ds += tl.dot(draw, fn.to(tl.float32), input_precision="tf32x3")
    tl.store(dstreams_ptr + cells, ds.to(dstreams_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expand_streams_fwd_kernel(
    streams_ptr,  # [T, N, D]
    y_ptr,  # [T, D]
    weights_ptr,  # fp32 [T, N + N * N]
    out_ptr,  # [T, N, D], out
    N: tl.constexpr,
    D: tl.constexpr,
    N_POW2: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's streams after a sublayer: post * y + comb^T @ streams, by `weights`."""
    t = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, N_POW2), tl.arange(0, BLOCK_D)
    row = t * (N * D) + d
    weights_ptr += t * (N + N * N)
    post = tl.load(weights_ptr + n, mask=n < N, other=0.0)
    for start in range(0, D, BLOCK_D):
        inside = d < D - start
        y = tl.load(y_ptr + t * D + start + d, mask=inside, other=0.0).to(tl.float32)
        out = post[:, None] * y[None, :]
        for j in tl.static_range(N):
            comb = tl.load(weights_ptr + N + j * N + n, mask=n < N, other=0.0)
            s = tl.load(streams_ptr + row + j * D + start, mask=inside, other=0.0).to(tl.float32)
            out += comb[:, None] * s[None, :]
        place = out_ptr + row[None, :] + n[:, None] * D + start
        mask = (n < N)[:, None] & inside[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expand_streams_bwd_kernel(
    dout_ptr,  # [T, N, D]
    streams_ptr,  # [T, N, D]
    y_ptr,  # [T, D]
    weights_ptr,  # fp32 [T, N + N * N]
    dstreams_ptr,  # [T, N, D], out
    dy_ptr,  # [T, D], out
    dweights_ptr,  # fp32 [T, N + N * N], out
    N: tl.constexpr,
    D: tl.constexpr,
    N_POW2: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's gradients of streams, y and weights."""
    t = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, N_POW2), tl.arange(0, BLOCK_D)
    row = t * (N * D) + d
    weights_ptr += t * (N + N * N)
    dweights_ptr += t * (N + N * N)
    post = tl.load(weights_ptr + n, mask=n < N, other=0.0)
    dpost = tl.zeros([N_POW2], dtype=tl.float32)
    dcomb = tl.zeros([N_POW2, N_POW2], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = d < D - start
        place = dout_ptr + row[None, :] + n[:, None] * D + start
        mask = (n < N)[:, None] & inside[None, :]
        dout = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + t * D + start + d, mask=inside, other=0.0).to(tl.float32)
        dpost += tl.sum(dout * y[None, :], 1)
        dy = tl.sum(post[:, None] * dout, 0).to(dy_ptr.dtype.element_ty)
        tl.store(dy_ptr + t * D + start + d, dy, mask=inside)
        for j in tl.static_range(N):
            comb = tl.load(weights_ptr + N + j * N + n, mask=n < N, other=0.0)
            s = tl.load(streams_ptr + row + j * D + start, mask=inside, other=0.0).to(tl.float32)
            dcomb += tl.where((n == j)[:, None], tl.sum(dout * s[None, :], 1)[None, :], 0.0)
            ds = tl.sum(comb[:, None] * dout, 0).to(dstreams_ptr.dtype.element_ty)
            tl.store(dstreams_ptr + row + j * D + start, ds, mask=inside)
    tl.store(dweights_ptr + n, dpost, mask=n < N)
    cells, real = n[:, None] * N + n[None, :], (n < N)[:, None] & (n < N)[None, :]
    tl.store(dweights_ptr + N + cells, dcomb, mask=real)
