"""Mixers: layers that keep something else than keys and values a head, over pages.

Each is pure functions of one rank's arrays, called inside the decoder's step; what the
ranks compute of their heads is summed by the caller behind the output projection. One
law for all: in any chunks and batches they give what their `dense` gives, which keeps
no cache.

Latent attention, and the indexer that selects what it reads (DeepSeek-V3.2):

    new = (table, starts, num_new)
    pages = latent.write_rows(pages, envelope, layer, latents, ropes, *new)
    queries = latent.Queries(nope, rope, positions, w_uk, w_uv)
    out = latent.attend_written(
        pages, envelope, layer, queries, table, lengths, scale, window, selected
    )  # f32[S, Q, G, V]
    out = latent.dense(queries, latents, ropes, scale, window, selected)

    pages = indexer.write_keys(pages, envelope, layer, keys, *new)
    scored = indexer.scores(pages, envelope, layer, q, weights, table, lengths)
    at = table.places(envelope.page_size)
    selected = indexer.select(scored, at, positions, lengths, k)  # i32[S, Q, B]
    scored = indexer.dense_scores(q, weights, keys)

Gated delta net (Qwen3-Next):

    g, beta = gated_delta.gates(a, b, a_log, dt_bias)
    inputs = gated_delta.Inputs(q, k, v, g, beta, conv_q, conv_k, conv_v)
    pages, out = gated_delta.mix(pages, envelope, layer, inputs, *new)
    out = gated_delta.dense(inputs, conv_dtype)  # f32[S, Q, W, V]

A layer writes all its rows before it reads any: a read that stands between two writes
makes the compiler copy the pool. `table` is the `kvmem.pool.table.GroupTable` of the
layer's own group and `envelope` that group's, cut to the pool's pages. A dense
reference of rows that the pages round uses `scaled.rounded(rows, dtype, num_scales)`.
"""

from kvmem.model.mixers import gated_delta, indexer, latent, scaled

__all__ = ["gated_delta", "indexer", "latent", "scaled"]
