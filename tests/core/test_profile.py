import dataclasses
import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import (
    BlockTimes,
    DeviceProfile,
    LayerMemory,
    LinkTimes,
    Profile,
    TimeFit,
)

DATE = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)


def times_of(lengths=(128,), tp_degree=1, scale=1.0) -> BlockTimes:
    return BlockTimes(
        tp_degree=tp_degree,
        lengths=lengths,
        blocks={1: (scale, 2 * scale), 2: (1.5 * scale, 3 * scale)},
        embedding=(0.1, 0.2),
        head=(0.3, 0.4),
    )


def profile_of(*names: str) -> Profile:
    return Profile(
        model=ModelSpec.load("bert-large"),
        devices=tuple(
            DeviceProfile(
                device=name,
                times=(times_of(), times_of((256, 3), tp_degree=2)),
                memory=(LayerMemory(tp_degree=1, layer_bytes_per_token=10.0),),
                step_s_per_param=1e-9,
                includes_tp_traffic=False,
            )
            for name in names
        ),
        versions={"torch": "2.13.0"},
        date=DATE,
    )


@given(st.integers(1, 100))
def test_layers_cost_the_sum_of_their_binary_blocks(n):
    powers = {1 << bit: (1.0 + bit, 2.0 + bit) for bit in range(7)}
    times = BlockTimes(tp_degree=1, lengths=(1,), blocks=powers)
    expected = tuple(sum(powers[b][i] for b in powers if b & n) for i in range(2))
    assert times.layers_s(n) == pytest.approx(expected)


def test_unmeasured_powers_repeat_the_next_smaller_block():
    times = BlockTimes(tp_degree=1, lengths=(1,), blocks={1: (1, 1), 4: (3, 5)})
    assert times.layers_s(2) == (2, 2)
    assert times.layers_s(4) == (3, 5)
    assert times.layers_s(11) == (2 * 3 + 3, 2 * 5 + 3)


def test_json_returns_the_same_profile(tmp_path):
    profile = profile_of("A10", "L4")
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_merge_keeps_both_device_types_and_the_older_date():
    later = dataclasses.replace(profile_of("L4"), date=DATE + datetime.timedelta(days=1))
    linked = with_links(profile_of("A10", "L4"))
    merged = linked.merge(later)
    assert [device.device for device in merged.devices] == ["A10", "L4"]
    assert merged.date == DATE
    assert merged.between_nodes == later.merge(linked).between_nodes == linked.between_nodes
    other = dataclasses.replace(profile_of("T4"), versions={"torch": "1.0"})
    with pytest.raises(ProfileError, match="torch"):
        merged.merge(other)


def test_stale_profiles_are_refused():
    week, now = datetime.timedelta(days=7), datetime.datetime.now(datetime.UTC)
    profile = dataclasses.replace(profile_of("A10"), date=now - datetime.timedelta(days=8))
    profile.check(model=profile.model, versions={"torch": "2.13.0"}, max_age=2 * week)
    with pytest.raises(ProfileError, match="8 days old"):
        profile.check(max_age=week)
    with pytest.raises(ProfileError, match=r"torch 2.13.0 but 2.14.0"):
        profile.check(versions={"torch": "2.14.0"})
    with pytest.raises(ProfileError, match="other sizes"):
        profile.check(model=ModelSpec.load("llama-7b"))
    profile.check(model=dataclasses.replace(profile.model, name="renamed"))


def test_missing_devices_and_degrees_are_named():
    profile = profile_of("A10")
    with pytest.raises(ProfileError, match=r"\['A10'\], not 'L4'"):
        profile.device("L4")
    with pytest.raises(ProfileError, match=r"\[1, 2\], not 4"):
        profile.device("A10").at(4)


def with_links(profile: Profile) -> Profile:
    """Return a profile whose devices reach each other at 1 GB/s, and nodes at 2 GB/s."""
    near = LinkTimes(bytes_per_s=1e9, latency_s=1e-5)
    return dataclasses.replace(
        profile,
        devices=tuple(dataclasses.replace(d, inside_node=near) for d in profile.devices),
        between_nodes=LinkTimes(bytes_per_s=2e9, latency_s=3e-5),
    )


def test_measured_links_replace_those_of_a_cluster_but_for_named_ones(tmp_path):
    with_links(profile_of("A10-24GB")).save(tmp_path / "p.json")
    measured = Profile.load(tmp_path / "p.json")
    nodes = (Node(device="A10-24GB", count=2), Node(device="A10-24GB", count=1))
    named = Link(nodes=(0, 0), bytes_per_s=7e9, latency_s=1e-6)
    found = measured.with_links(Cluster(nodes=nodes, links=(named,)))
    assert found.link_between(0, 0) == (7e9, 1e-6)
    assert found.link_between(1, 1) == (1e9, 1e-5)
    assert found.link_between(0, 1) == (2e9, 3e-5)
    assert measured.with_links(found) == found
    plain = profile_of("A10-24GB").with_links(Cluster(nodes=nodes))
    assert plain == Cluster(nodes=nodes)


@given(st.floats(0, 1e-6), st.floats(1e-6, 1e-3), st.floats(0, 1.0), st.integers(0, 2**32 - 1))
def test_fit_finds_the_coefficients_that_made_the_samples(a, b, c, seed):
    rng = np.random.default_rng(seed)
    batches = [tuple(map(int, rng.integers(1, 4096, size=k))) for k in (1, 1, 2, 3, 4, 5)]
    exact = TimeFit(a=a, b=b, c=c)
    fitted = TimeFit.of([(lengths, exact(lengths)) for lengths in batches])
    for lengths in batches:
        assert fitted(lengths) == pytest.approx(exact(lengths), rel=1e-3)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6))
def test_fit_never_has_negative_coefficients(seconds):
    samples = [((64 * (i + 1),), value) for i, value in enumerate(seconds)]
    fitted = TimeFit.of(samples)
    assert min(fitted.a, fitted.b, fitted.c) >= 0
    assert fitted((10_000,)) > 0


def test_one_length_says_nothing_about_the_square():
    fitted = TimeFit.of([((512,) * n, 0.01 * n) for n in (1, 2, 4)])
    assert fitted.a == 0
    assert fitted((512,) * 8) == pytest.approx(0.08)
