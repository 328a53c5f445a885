"""A decoder of one's own on kvmem's pages, in twenty lines."""

# [example]
import jax
import jax.numpy as jnp

from kvmem.geometry import LayerSpec, Topology, envelope, group_layers
from kvmem.model.attention import attend

layers = [LayerSpec(f"layer{i}", i, kv_heads=2, head_dim=16) for i in range(3)]
(group,) = group_layers(layers, page_size=8)
page = envelope.build(group, Topology(), rank=0)
pages = jnp.zeros((64, page.nbytes), jnp.uint8)  # 64 pages of 8 tokens, 3 layers


def my_decoder(weights, pages, x, table, starts, num_new):
    """Read the new tokens x [sequences, tokens, 64]; pages go in and come back."""
    for layer, w in zip(layers, weights, strict=True):
        q, k, v = jnp.split(x @ w["qkv"], (64, 96), axis=-1)  # 4 query, 2 KV heads
        q, k, v = (a.reshape(*x.shape[:2], -1, 16) for a in (q, k, v))
        pages, seen = attend(pages, page, layer.name, q, k, v, table, starts, num_new)
        x = x + jnp.tanh(seen.reshape(x.shape) @ w["out"])
    return pages, x


step = jax.jit(my_decoder, donate_argnums=1)
# [end]


def test_the_example_gives_in_two_calls_what_one_call_gives():
    keys = jax.random.split(jax.random.key(0), 7)
    weights = [
        {
            "qkv": jax.random.normal(keys[i], (64, 128)) / 8,
            "out": jax.random.normal(keys[i + 3], (64, 64)) / 8,
        }
        for i in range(3)
    ]
    x = jax.random.normal(keys[6], (1, 12, 64))
    table = jnp.array([[40, 7]])

    def ints(number):
        return jnp.array([number])

    _, whole = step(weights, pages + 0, x, table, ints(0), ints(12))
    kept, _ = step(weights, pages + 0, x[:, :9], table, ints(0), ints(9))
    _, rest = step(weights, kept, x[:, 9:], table, ints(9), ints(3))
    assert jnp.allclose(rest, whole[:, 9:], atol=1e-5)
    assert not jnp.allclose(rest, x[:, 9:], atol=1e-2)
