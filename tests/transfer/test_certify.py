"""Certification: the real write path passes, and every mutant of it is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kvmem import canonical, errors, mesh, transfer
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers, kinds
from kvmem.model import attention
from kvmem.pool import tokens
from kvmem.transfer import numbers, trial

ORDERS = [*envelope.ORDERS, "layer | token head field", "layer | head field token"]


def group(heads=3, dim=8, page_size=4, layers=2, **spec):
    specs = [
        LayerSpec(f"layers.{i}", i, kv_heads=heads, head_dim=dim, **spec)
        for i in range(layers)
    ]
    (made,) = group_layers(specs, page_size=page_size)
    return made


def entry_by_entry(pages, env, layer, k, v, table, starts, num_new):
    """Write by the pool's own rows: a second write path, made of `tokens.write`."""
    positions = starts[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    at, slots = positions // env.page_size, positions % env.page_size
    ids = jnp.take_along_axis(table, at, axis=1, mode="fill", fill_value=1 << 20)
    new = jnp.arange(k.shape[1], dtype=jnp.int32)[None] < num_new[:, None]
    ids = jnp.where(new, ids, pages.shape[0]).reshape(-1)
    for name, rows in (("k", k), ("v", v)):
        first = 0
        for entry in env.entries_of(layer, name):
            own = rows[:, :, first : first + entry.nheads]
            raw = jax.lax.bitcast_convert_type(own, jnp.uint8)
            raw = raw.reshape(ids.size, entry.nbytes)
            pages = tokens.write(
                pages, entry, ids, slots.reshape(-1), raw, page_size=env.page_size
            )
            first += entry.nheads
    return pages


@pytest.mark.parametrize("write", [attention.write_rows, entry_by_entry])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp", [1, 3, 9])
@pytest.mark.cover(2)
def test_the_real_write_path_meets_no_objection(write, order, tp):
    plan = canonical.plan(group(v_head_dim=4), Topology(tp), order)
    assert transfer.certify(plan, write) == ()


@pytest.mark.parametrize(
    "topology, page_size",
    [(Topology(3, 2, 2), 4), (Topology(1, 3, 1), 3), (Topology(6, 2, 4), 8)],
    ids=str,
)
def test_token_shards_are_certified(implementation, topology, page_size):
    plan = canonical.plan(group(page_size=page_size), topology)
    found = transfer.certify(plan, attention.write_rows, implementation=implementation)
    assert found == ()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("topology", [Topology(6), Topology(3, 2)], ids=str)
@pytest.mark.parametrize("order", ["head_major", ORDERS[-2]])
@pytest.mark.cover(2)
def test_a_mesh_is_certified(implementation, mutants, kind, topology, order):
    made = mesh.make(topology, axis_type=kind)
    plan = canonical.plan(group(), topology, order)
    options = {"mesh": made, "implementation": implementation}
    assert transfer.certify(plan, attention.write_rows, **options) == ()
    found = transfer.certify(mutants.rotated(plan), attention.write_rows, **options)
    assert "placement" in {each.law for each in found}


@pytest.mark.parametrize(
    "dtype, passes", [("float32", 1), ("float16", 2), ("bfloat16", 2)]
)
def test_a_dtype_carries_the_numbers_in_as_many_passes_as_it_needs(dtype, passes):
    plan = canonical.plan(group(dtype=dtype, dim=32), Topology(3))
    num_tokens = trial.shape(plan).num_tokens
    assert numbers.num_passes(plan.group, num_tokens) == passes
    assert transfer.certify(plan, attention.write_rows) == ()


@pytest.mark.parametrize("dtype, passes", [("float8_e4m3fn", 4), ("float8_e5m2", 5)])
def test_the_narrowest_dtypes_need_more_passes_and_each_is_judged(dtype, passes):
    plan = canonical.plan(group(dtype=dtype, dim=32), Topology(3))
    num_tokens = trial.shape(plan).num_tokens
    assert numbers.num_passes(plan.group, num_tokens) == passes
    assert transfer.certify(plan, entry_by_entry) == ()

    def exchanged(pages, env, layer, k, v, table, starts, num_new):
        """Exchange elements whose lowest digits are equal: one pass sees nothing."""
        wide = k.at[..., 0].set(k[..., 16]).at[..., 16].set(k[..., 0])
        return entry_by_entry(pages, env, layer, wide, v, table, starts, num_new)

    found = transfer.certify(plan, exchanged)
    assert {(each.layer, each.field) for each in found} == {
        ("layers.0", "k"),
        ("layers.1", "k"),
    }


@pytest.mark.parametrize("mutate", ["rotated", "reversed_page"])
@pytest.mark.parametrize("order", ["head_major", "token_major", ORDERS[-1]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.cover(2)
def test_a_wrong_bijection_is_named_though_it_tiles(mutants, mutate, order, dtype):
    plan = getattr(mutants, mutate)(
        canonical.plan(group(dtype=dtype), Topology(3), order)
    )
    assert canonical.check(plan) == ()
    found = transfer.certify(plan, attention.write_rows)
    moved = {each[1:4] for each in found if each.law == "placement"}
    assert len(moved) == 2 * 3 * 2  # every layer, head and field, at once
    holds = {
        "rotated": "holds layer layers.0 head 2 field k, token 0",
        "reversed_page": "holds layer layers.0 head 0 field k, token 3",
    }
    assert holds[mutate] in str(found[0])


def through(change):
    """Return the real write path with its arguments changed."""

    def write(pages, env, layer, k, v, table, starts, num_new):
        args = {
            "pages": pages, "envelope": env, "layer": layer, "k": k, "v": v,
            "table": table, "starts": starts, "num_new": num_new,
        }  # fmt: skip
        return attention.write_rows(**(args | change(args)))

    return write


ROWS = ("k", "v", "table", "starts", "num_new")  # arguments that a batch has rows of

WRITERS = {
    "k for v": (lambda a: {"k": a["v"], "v": a["k"]}, "placement"),
    "heads turned round": (lambda a: {"k": a["k"][:, :, ::-1]}, "placement"),
    "elements turned round": (lambda a: {"v": a["v"][..., ::-1]}, "bytes"),
    "one slot late": (lambda a: {"starts": a["starts"] + 1}, "bytes"),
    "the second call overwrites": (lambda a: {"starts": a["starts"] * 0}, "placement"),
    "a layer too far": (
        lambda a: {"layer": {"layers.0": "layers.1"}.get(a["layer"], "layers.0")},
        "placement",
    ),
    "table turned round": (
        lambda a: {"table": a["table"].at[:, :3].set(a["table"][:, 2::-1])},
        "placement",
    ),
    "pages beside those of the table": (
        lambda a: {"table": (a["table"] + 1) % 8},
        "bytes",
    ),
    "rounded on the way": (
        lambda a: {"k": a["k"].astype(jnp.bfloat16).astype(jnp.float32)},
        "bytes|placement",
    ),
    "zeros become no number": (
        lambda a: {"k": jnp.where(a["k"] == 0, jnp.nan, a["k"])},
        "bytes",
    ),
    "zeros change their sign": (
        lambda a: {"k": jnp.where(a["k"] == 0, -0.0, a["k"])},
        "bytes",
    ),
    "cast through half floats": (
        lambda a: {"k": a["k"].astype(jnp.float16).astype(jnp.float32)},
        "bytes|placement",
    ),
    "sequences exchanged where they are several": (
        lambda a: {"k": a["k"][jnp.array([1, 0, 2])]},
        "placement",
    ),
    "the first sequence alone": (
        lambda a: {name: a[name][:1] for name in ROWS},
        "bytes",
    ),
    "k for v in a step of one token": (
        lambda a: {"k": a["v"]} if a["k"].shape[1] == 1 else {},
        "placement",
    ),
    "k for v in a prompt": (
        lambda a: {"k": a["v"]} if a["k"].shape[1] > 1 else {},
        "placement",
    ),
    "positions modulo 64": (lambda a: {"starts": a["starts"] % 64}, "bytes"),
    "positions in 16 bits": (
        lambda a: {"starts": a["starts"].astype(jnp.uint16).astype(jnp.int32) + 0},
        "bytes",
    ),
    "padded rows are kept": (lambda a: {"num_new": a["num_new"] + 1}, "import"),
    "the last token is dropped": (lambda a: {"num_new": a["num_new"] - 1}, "bytes"),
    "rows of no sequence are written": (
        lambda a: {
            "table": jnp.where(a["table"] >= 8, 7, a["table"]),
            "num_new": jnp.where(a["num_new"] == 0, 1, a["num_new"]),
        },
        "import",
    ),
}


@pytest.mark.parametrize("mutant", WRITERS)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.cover(2)
def test_a_write_path_that_errs_is_named(implementation, mutant, tp):
    change, laws = WRITERS[mutant]
    plan = canonical.plan(group(heads=2, layers=2), Topology(tp))
    if mutant == "heads turned round" and tp == 4:
        pytest.skip("one local head has no order")
    shape = trial.shape(plan)
    used = np.concatenate([piece.page_ids for piece in shape.pieces])
    assert shape.num_pages == 8 and 7 not in used
    found = transfer.certify(plan, through(change), implementation=implementation)
    assert found
    assert {each.law for each in found} & set(laws.split("|"))


def test_padding_that_a_write_path_fills_is_named(implementation):
    plan = canonical.plan(group(dim=5), Topology(3), "split_hnd")  # 20 bytes of 32

    def write(pages, env, layer, k, v, table, starts, num_new):
        pages = attention.write_rows(pages, env, layer, k, v, table, starts, num_new)
        return pages.at[table[0, 0], 20:32].set(0)

    assert transfer.certify(plan, attention.write_rows) == ()
    found = transfer.certify(plan, write, implementation=implementation)
    assert {each.law for each in found} == {"import"}
    assert len(found) == 3  # once a rank
    for rank, each in enumerate(found):
        assert f"rank {rank} array 0 page" in str(each)
        assert "byte 20 is padding that was written" in str(each)


class TwoWriters(canonical.CopyPlan):
    """A plan in which ranks 1 and 3 write all that they hold."""

    def writers(self, turn=canonical.Turn()):  # noqa: B008
        return ((), self.runs[1], (), self.runs[3])


def test_a_holder_that_errs_is_named_though_it_is_nobodys_writer(implementation):
    sound = canonical.plan(group(heads=2, layers=1), Topology(4))
    plan = TwoWriters(sound.group, sound.topology, sound.order, sound.held)

    def write(pages, env, layer, k, v, table, starts, num_new):
        rows = jnp.where(jax.lax.axis_index("tp") == 2, v, k)
        return attention.write_rows(pages, env, layer, rows, v, table, starts, num_new)

    options = {"mesh": mesh.make(Topology(4)), "implementation": implementation}
    assert transfer.certify(plan, attention.write_rows, **options) == ()
    (found,) = transfer.certify(plan, write, **options)
    assert found[:4] == ("import", "layers.0", 1, "k")
    assert "rank 2 page" in str(found)


@pytest.mark.case("LAY-07")
def test_one_uncertifiable_layer_is_an_error_that_names_every_one():
    layers = [
        LayerSpec(f"layers.{i}", i, kv_heads=2, head_dim=8, dtype=dtype)
        for i, dtype in enumerate(
            ["float32", "float8_e4m3fn", "bfloat16", "float8_e5m2"]
        )
    ]
    (made,) = group_layers(layers, page_size=4)
    plan = canonical.plan(made, Topology(2))
    found = transfer.certify(plan, attention.write_rows)
    assert [(each.law, each.layer) for each in found] == [
        ("refused", "layers.1"),
        ("refused", "layers.3"),
    ]
    with pytest.raises(errors.IncompatiblePlan) as refusal:
        transfer.require_certified(plan, attention.write_rows)
    message = str(refusal.value)
    assert "refused: layer layers.1: attention over float8_e4m3fn pages" in message
    assert "refused: layer layers.3: attention over float8_e5m2 pages" in message
    assert "every layer is certified, or no record is shared" in message


@pytest.mark.case("LAY-07")
@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_of_a_kind_that_no_write_path_serves_is_refused_by_name(fp8):
    layers = [
        LayerSpec("layers.0", 0, kv_heads=2, head_dim=8),
        kinds.latent("layers.1", 1, rank=128, rope_dim=8, scale=1.0, fp8=fp8),
    ]
    (made,) = group_layers(layers, page_size=4)
    plan = canonical.plan(made, Topology(2))
    (found,) = transfer.certify(plan, attention.write_rows)
    assert found[:2] == ("refused", "layers.1")
    assert "keeps latent" in str(found)
    swapped = through(lambda a: {"k": a["v"], "v": a["k"]})
    laws = {(each.law, each.layer) for each in transfer.certify(plan, swapped)}
    assert laws == {("refused", "layers.1"), ("placement", "layers.0")}


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        (lambda pages: 1 / 0, "it raises ZeroDivisionError: division by zero"),
        (lambda pages: pages.no_such, "it raises AttributeError"),
        (lambda pages: pages[:-1], "it gives uint8"),
        (lambda pages: pages[:, :-1], "it gives uint8"),
        (lambda pages: pages.astype(jnp.float32), "it gives float32"),
        (lambda pages: None, "it gives NoneType"),
    ],
)
@pytest.mark.parametrize("tp, step", [(1, False), (3, False), (3, True)])
def test_a_write_path_that_raises_or_gives_other_pages_is_an_objection(
    changed, phrase, tp, step
):
    def write(pages, env, layer, k, v, table, starts, num_new):
        errs = layer == "layers.1" and (not step or k.shape[1] == 1)
        pages = attention.write_rows(pages, env, layer, k, v, table, starts, num_new)
        return changed(pages) if errs else pages

    (found,) = transfer.certify(canonical.plan(group(), Topology(tp)), write)
    assert found[:2] == ("refused", "layers.1")
    assert phrase in str(found)


@pytest.mark.case("LAY-07")
def test_faults_of_several_laws_come_back_together():
    def write(pages, env, layer, k, v, table, starts, num_new):
        if layer == "layers.0":
            raise ValueError("no kernel for this layer")
        return attention.write_rows(pages, env, layer, v, k, table, starts, num_new)

    plan = canonical.plan(group(layers=2), Topology(3))
    found = transfer.certify(plan, write)
    assert {(each.law, each.layer) for each in found} == {
        ("refused", "layers.0"),
        ("placement", "layers.1"),
    }
    with pytest.raises(errors.IncompatiblePlan, match="no kernel.*placement"):
        transfer.require_certified(plan, write)


@pytest.mark.parametrize(
    "order, num_pages",
    [("layer field | token head", None), ("layer | field | token head", 6)],
)
def test_planes_that_no_write_path_can_be_given_are_refused(order, num_pages):
    plan = canonical.plan(group(), Topology(3), order, num_pages=num_pages)
    found = transfer.certify(plan, attention.write_rows)
    assert [each[:2] for each in found] == [
        ("refused", "layers.0"),
        ("refused", "layers.1"),
    ]
    assert "spreads a page of it over 2 planes" in str(found[0])


def test_what_is_certified_raises_nothing_and_a_small_mesh_is_refused():
    plan = canonical.plan(group(), Topology(3))
    assert transfer.require_certified(plan, attention.write_rows) is None
    with pytest.raises(errors.IncompatiblePlan, match="3 ranks on a mesh of 6"):
        transfer.certify(plan, attention.write_rows, mesh=mesh.make(Topology(6)))


def test_an_executor_that_errs_is_named(monkeypatch):
    plan = canonical.plan(group(), Topology(3))
    host = transfer.host

    def skewed(local, record):
        whole = np.ascontiguousarray(local)  # bytes, or an element a row
        wrong = np.roll(whole.view(np.uint8), 1, axis=-1)
        np.copyto(record, np.ascontiguousarray(wrong).view(whole.dtype))

    monkeypatch.setattr(host, "_to_records", skewed)
    found = transfer.certify(plan, attention.write_rows, implementation="host")
    assert {each.law for each in found} & {"bytes", "placement"}
    assert {each.layer for each in found} >= {"layers.0", "layers.1"}
