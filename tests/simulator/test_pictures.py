import itertools
from unittest import mock

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import (
    TERM_NAMES,
    MemoryTerms,
    RooflineCost,
    StageFacts,
    plot_timeline,
    simulate,
    split_batch,
)
from lightning_hetero.simulator.pictures import draw_memory

PLAN = ParallelPlan.even(world_size=4, num_layers=24, num_stages=2)


COST = RooflineCost(
    Cluster(nodes=(Node(device="A100-80GB", count=4),)), ModelSpec.load("bert-large")
)


def run(*, record: bool = True):
    batches = split_batch(PLAN, global_batch_size=6, sequence_length=512)
    return simulate(PLAN, COST, batches, record_events=record)


def draw(path, plan, simulation):
    plot_timeline(path, plan, simulation)


def test_unrecorded_simulations_and_unwritable_files_are_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="record_events"):
        draw(tmp_path / "x.svg", PLAN, run(record=False))
    with pytest.raises(ConfigurationError, match="Can't write"):
        draw(tmp_path / "missing" / "x.svg", PLAN, run())
    with pytest.raises(ConfigurationError, match="Can't draw"):
        draw(tmp_path / "x.nothing", PLAN, run())


def test_bars_of_memory_are_stacked_by_term_and_end_where_the_device_does():
    names = [name for name in TERM_NAMES if name != "reserved"]
    terms = MemoryTerms(**{name: n * 2.0**30 for n, name in enumerate(names, start=1)})
    axes = mock.MagicMock()
    facts = [[StageFacts(device="A", memory=terms, device_bytes=80 * 2**30)] * 2]
    draw_memory(axes, {(0, 0): 1.0, (0, 1): 2.0}, facts)
    bars = [call.kwargs["left"] + call.args[1] for call in axes.barh.call_args_list]
    assert [call.kwargs["label"] for call in axes.barh.call_args_list] == list(TERM_NAMES.values())
    widths = [*range(1, 10), 4.2]
    for width, left, (first, second, *both) in zip(
        widths, itertools.accumulate(widths, initial=0), bars, strict=False
    ):
        assert first == second == pytest.approx(left)
        assert both == pytest.approx([width, width])
    edges = [call.args for call in axes.plot.call_args_list]
    assert edges == [([80, 80], [1.0, 1.8]), ([80, 80], [2.0, 2.8])]


def test_a_picture_draws_like_pipelines_once_and_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    texts = []
    draw(tmp_path / "timeline.png", PLAN, run())
    assert (tmp_path / "timeline.png").stat().st_size > 5_000
    for sizes in (6, 7):  # 7 micro-batches make the two pipelines unlike
        path = tmp_path / f"{sizes}.svg"
        batches = split_batch(PLAN, global_batch_size=sizes, sequence_length=512)
        draw(path, PLAN, simulate(PLAN, COST, batches, record_events=True))
        texts.append(path.read_text())
    assert "pipelines 0-1 (2 ×), 3 micro-batches each" in texts[0]
    assert "pipeline 0, 4 micro-batches" in texts[1]
    assert "pipeline 1, 3 micro-batches" in texts[1]
    for text, lanes in zip(texts, (1, 2), strict=True):
        assert text.count("stage 0: 1 × A100-80GB, layers 0-11") == lanes
