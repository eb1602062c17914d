"""What-if analysis of operation traces: planted causes, and a production job's trace."""

import gzip
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_hetero.cli import main
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.replay import Replay
from lightning_hetero.straggler.traces import Layout, OperationTrace, read_operations
from lightning_hetero.straggler.what_if import answer, explain
from tests.straggler.emulated import Planted

DATA = Path(__file__).parents[3] / "shared/data/straggler-traces"
SHAPES = [(4, 4), (2, 2), (8, 2), (3, 6)]
CAUSES = {
    "stage": ("heavy_last", lambda rng: rng.uniform(1.3, 1.8)),
    "lengths": ("lengths", lambda rng: rng.uniform(0.3, 0.6)),
    "link": ("slow_link", lambda rng: (1, 0, rng.uniform(40, 80))),
    "rank": ("slow_rank", lambda rng: (int(rng.integers(4)), rng.uniform(1.3, 2.5))),
    "pauses": ("pause_s", lambda rng: rng.uniform(0.8, 1.6)),
}


def explained(run):
    return explain(OperationTrace.from_columns(run.columns()))


def seconds(run):
    columns = run.columns()
    end = columns["start_ts"] + columns["duration"]
    return float(np.mean([end[columns["step"] == s].max() for s in range(run.num_steps)]))


def true_shares(run, names):
    """Return the planted causes' shares, by running the job again without and with only them.

    What is possible has neither causes nor noise.
    """
    fields = {name: CAUSES[name][0] for name in names}
    nothing = {field: getattr(Planted(), field) for field in fields.values()}
    clean = replace(run, **nothing, noise=0.0, speed_sd=0.0)
    full, least = seconds(run), seconds(clean)
    shares = {}
    for name, field in fields.items():
        without = seconds(replace(run, **{field: nothing[field]}))
        only = seconds(replace(clean, **{field: getattr(run, field)}))
        shares[name] = float(np.clip((full - without + only - least) / 2 / (full - least), 0, 1))
    return shares


def planted(seed, names):
    rng = np.random.default_rng(seed)
    pipelines, stages = SHAPES[int(rng.integers(len(SHAPES)))]
    settings = {field: draw(rng) for field, draw in (CAUSES[name] for name in names)}
    return Planted(
        num_pipelines=pipelines,
        num_stages=stages,
        num_chunks=2 if stages in (2, 4) and rng.random() < 0.3 else 1,
        num_steps=4,
        seed=seed,
        speed_sd=0.01,
        in_background=bool(rng.integers(2)),
        are_pauses_rows=bool(rng.integers(2)),
        **settings,
    )


@pytest.mark.slow
def test_the_planted_cause_is_named_first():
    combinations = [(n,) for n in CAUSES] + list(itertools.combinations(CAUSES, 2))
    right = close = 0
    accused_wrongly = []
    for seed in range(20_000, 20_100):
        names = combinations[seed % len(combinations)]
        run = planted(seed, names)
        found, truth = explained(run), true_shares(run, names)
        shares = {cause.kind: cause.share for cause in found.causes}
        # Where two shares are nearly equal, either may come first.
        right += truth.get(found.causes[0].kind, 0.0) >= max(truth.values()) - 0.05
        close += all(abs(shares.get(n, 0.0) - share) <= 0.1 for n, share in truth.items())
        slow = run.slow_rank[0] if run.slow_rank else None
        accused_wrongly += [c for c in found.causes if c.kind == "rank" and c.which != slow]
        assert abs(found.replayed_s / found.actual_s - 1) < 0.03
    assert right >= 95
    assert close >= 95
    assert not accused_wrongly


@pytest.mark.parametrize(
    ("run", "causes"),
    [
        *((Planted(num_pipelines=p, num_stages=s), {}) for p, s in [*SHAPES, (4, 1), (1, 4)]),
        # With one stage, what slows a pipeline is a rank; unequal lengths aren't a rank's doing.
        (Planted(num_pipelines=6, num_stages=1, lengths=0.5), {"lengths": None}),
        (Planted(num_pipelines=4, num_stages=1, slow_rank=(2, 1.5)), {"rank": 2}),
        # It begins late, and is no pause for that.
        (Planted(slow_rank=(5, 3.0), slow_from=4), {"rank": 5}),
        (Planted(slow_rank=(5, 1.4), slow_from=4), {"rank": 5}),
        (Planted(num_pipelines=8, num_stages=1, slow_rank=(2, 2.0), slow_from=4), {"rank": 2}),
        # It isn't the rank that shares a pipeline with it.
        (Planted(num_pipelines=2, num_stages=2, noise=0.1, slow_rank=(1, 1.8)), {"rank": 1}),
    ],
)
def test_nobody_is_accused_but_who_is_slow(run, causes):
    found = explained(run)
    accused = {c.kind: c.which for c in found.causes if c.kind in ("rank", "link", "pauses")}
    assert accused == {kind: which for kind, which in causes.items() if kind == "rank"}
    assert not run.slow_rank or found.causes[0].share > 0.85
    assert answer(found).startswith("Not slow: ") == (found.slowdown < 1.02) == (not causes)
    assert not causes or found.causes[0].kind in causes
    if run.slow_rank and not run.slow_from and run.noise < 0.1:
        assert found.causes[0].factor == pytest.approx(1.5, rel=0.03)


def test_half_of_the_links_being_slow_is_not_usual():
    run = Planted(num_pipelines=2, num_stages=2, slow_link=(1, 0, 50.0))
    assert explained(run).ideal_s == pytest.approx(seconds(replace(run, slow_link=None)), rel=0.02)


def test_a_pause_costs_as_much_whatever_it_interrupts():
    run = Planted(num_stages=1, lengths=0.5, noise=0.0, pause_s=1.0, pause_rate=0.03)
    truth = true_shares(run, ["lengths", "pauses"])["pauses"]
    shares = {cause.kind: cause.share for cause in explained(run).causes}
    assert shares["pauses"] == pytest.approx(truth, abs=0.1)


def test_of_a_batch_of_messages_only_the_last_takes_all_its_time():
    # Stage 1 exchanges with both neighbours at once, and stage 2 comes late.
    names = ["forward-send", "backward-recv"], ["forward-recv", "backward-send"]
    rows = []
    for step in range(4):
        late_s = 3.0 if step else 1.0
        ends_s = (1.0, 1.01), (1.0, late_s + 0.01), (late_s, late_s + 0.01)
        for stage, (begin_s, end_s) in enumerate(ends_s):
            transfers = [*(names[0] if stage < 2 else ()), *(names[1] if stage else ())]
            place = step, stage, 0, stage
            rows += [(*place, f"{n}-compute", 0.0, begin_s) for n in ("forward", "backward")]
            rows += [(*place, name, begin_s, end_s - begin_s) for name in transfers]
    keys = ["step", "rank", "dp_rank", "stage", "optype", "start_ts", "duration"]
    columns = {key: np.array(v) for key, v in zip(keys, zip(*rows, strict=True), strict=True)}
    columns["mb_id"] = np.zeros(len(rows), int)
    replay = Replay.build(OperationTrace.from_columns(columns))
    transfers = np.flatnonzero(replay.trace.are(*names[0], *names[1]))
    assert replay.own_s[transfers] == pytest.approx(0.01)
    assert replay.step_s(replay.own_s, replay.gap_s) == pytest.approx(replay.observed_s())


@pytest.mark.parametrize("unit_s", [1.0, 1e-3, 1e-6, 1e-9])
def test_a_trace_means_the_same_in_any_unit_order_and_with_an_incomplete_step(unit_s):
    columns = Planted(slow_rank=(5, 1.8)).columns()
    expected = explain(OperationTrace.from_columns(columns))
    order = np.random.default_rng(0).permutation(len(columns["step"]))
    lost = (columns["step"] == 5) & (columns["rank"] == 6) & (columns["start_ts"] > 2.0)
    order = order[~lost[order]]
    shuffled = {name: values[order] for name, values in columns.items()}
    for name in ("start_ts", "duration"):
        shuffled[name] = np.round(shuffled[name] / unit_s, 0 if unit_s < 1e-3 else 6)
    trace = OperationTrace.from_columns(shuffled)
    found = explain(trace)
    assert (trace.unit_s, trace.num_left_out) == (unit_s, 1)
    assert found.slowdown == pytest.approx(expected.slowdown, rel=0.01)
    assert (found.causes[0].kind, found.causes[0].which) == ("rank", 5)


@pytest.mark.parametrize("hidden", [(), ("grads-reduce-scatter",), ("params-all-gather",)])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_replay_takes_as_long_as_the_run_also_where_a_barrier_is_not_recorded(
    hidden, in_background
):
    run = Planted(slow_rank=(5, 2.0), lengths=0.3, in_background=in_background)
    columns = run.columns()
    is_kept = ~np.isin(columns["optype"], hidden)
    trace = OperationTrace.from_columns({name: item[is_kept] for name, item in columns.items()})
    replay = Replay.build(trace)
    for gap_s in (replay.gap_s, replay.gap_s * 0):
        # Nothing but waiting is between the operations.
        assert replay.step_s(replay.own_s, gap_s) == pytest.approx(replay.observed_s(), rel=1e-3)


def test_the_command_reads_compressed_json_lines_and_says_what_to_do(tmp_path, capsys):
    text = answer(explained(Planted(heavy_last=1.6)), Layout(layers=(8, 8, 8, 8)))
    assert "the split into stages: stage 3" in text
    assert "move 2 layers from stage 3" in text
    columns = Planted(slow_rank=(2, 2.0)).columns()
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = "\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
    trace, meta, shares = (tmp_path / name for name in ("t.jsonl.gz", "m.yaml", "s.json"))
    trace.write_bytes(gzip.compress(lines.encode()))
    meta.write_text(yaml.dump({"dp_size": 4, "tp_size": 2, "nodes": {2: "node-b"}}))
    command = ["stragglers", "explain", str(trace), "--layout", str(meta), "--json", str(shares)]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "one of ranks 2 to 3, 1.9" in output
    assert "replace node-b" in output
    entry = json.loads(shares.read_text())
    assert {"kind", "which", "share"} <= entry["causes"][0].keys()
    assert entry["actual_s"] / entry["ideal_s"] == pytest.approx(entry["slowdown"])
    with pytest.raises(SystemExit):
        main(["stragglers", "explain", "--help"])
    help_text = capsys.readouterr().out
    assert "usage: lightning-hetero stragglers explain [-h]" in help_text
    assert "$ lightning-hetero stragglers explain operations/" in help_text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"step": 0}', "has no column rank"),
        ("", "no column"),
        ('{"step": 0}\nnonsense', "Line 2 isn't JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        read_operations(path)


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("compute", "no forward-compute, without which"),
        ("recv", "no backward-recv and no forward-recv"),
        ("send", "no backward-send and no forward-send"),
    ],
)
def test_a_trace_that_does_not_tell_waiting_from_work_is_refused(lacks, reason):
    columns = Planted().columns()
    kept = [lacks not in kind for kind in columns["optype"]]
    with pytest.raises(ConfigurationError, match=reason):
        OperationTrace.from_columns({name: item[kept] for name, item in columns.items()})
    columns["mb_id"] = [None] * len(kept)
    with pytest.raises(ConfigurationError, match="Column mb_id"):
        OperationTrace.from_columns(columns)


@pytest.mark.parametrize(
    "is_lost",
    [lambda c: c["rank"] == 5, lambda c: (c["mb_id"] == 1) & (c["rank"] == 5)],
)
def test_a_trace_that_lacks_operations_everywhere_is_refused(is_lost):
    columns = Planted().columns()
    kept = ~is_lost(columns)
    with pytest.raises(ConfigurationError, match="None of the trace's 6 steps is complete"):
        OperationTrace.from_columns({name: item[kept] for name, item in columns.items()})


def test_clocks_that_differ_are_refused():
    columns = Planted().columns()
    columns["start_ts"] = columns["start_ts"] + 3.0 * (columns["rank"] == 6)
    with pytest.raises(ConfigurationError, match=r"up to .* s before they are sent"):
        explain(OperationTrace.from_columns(columns))


@pytest.mark.parametrize("name", ["rank", "dp_rank", "stage"])
def test_places_below_0_are_refused(name):
    columns = Planted().columns()
    columns[name] -= 1
    with pytest.raises(ConfigurationError, match="below 0"):
        OperationTrace.from_columns(columns)


def test_100_000_operations_are_replayed_within_two_seconds():
    columns = Planted(num_pipelines=8, num_microbatches=32, num_steps=16).columns()
    repeats = -(-100_000 // len(columns["step"]))
    several = {name: np.tile(values, repeats) for name, values in columns.items()}
    several["step"] += np.repeat(np.arange(repeats), len(columns["step"])) * 16
    trace = OperationTrace.from_columns(several)
    began = time.process_time()
    replay = Replay.build(trace)
    replayed_s = replay.step_s(replay.own_s, replay.gap_s)
    assert time.process_time() - began < 2.0
    np.testing.assert_allclose(replayed_s, replay.observed_s(), rtol=0.03)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the production job's trace")
def test_a_production_job_is_explained_as_published():
    pytest.importorskip("pyarrow")
    found = explain(read_operations(DATA / "trace-AR.parquet"))
    assert found.slowdown == pytest.approx(46.34 / 23.48, rel=0.02)
    assert found.replayed_s == pytest.approx(found.actual_s, rel=0.03)
    ranks = [cause for cause in found.causes if cause.kind == "rank"]
    assert [cause.which for cause in ranks] == [0]
    assert ranks[0].share >= 0.95
