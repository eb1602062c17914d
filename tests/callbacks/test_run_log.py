import types

import lightning as L
import pytest

from examples.slow_parts import InjectFaults, SlowRank
from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import RunLog, RunMetrics, StragglerMonitor, read_log
from lightning_hetero.straggler import read_events
from tests.toy import ToyModule, ToyOptions, loader, quiet

STAGES = [{"ranks": [0], "layers": [0, stop]} for stop in (3, 4, 5)]

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder, strategy="hetero", module=None, callbacks=()):
    trainer = L.Trainer(
        **quiet(devices=1, strategy=strategy, max_steps=4, num_sanity_val_steps=1),
        callbacks=[*callbacks, RunLog(node="here")],
        default_root_dir=folder,
        log_every_n_steps=2,
    )
    trainer.fit(module or ToyModule(ToyOptions()), loader(8, 2), loader(4, 2))
    return list(read_log(folder / "events.jsonl"))


class Failing(ToyModule):
    def on_train_batch_end(self, *args):
        if self.trainer.global_step == 3:
            raise RuntimeError("enough")


def test_a_run_notes_what_happens_in_the_order_in_which_it_does(tmp_path):
    fault = SlowRank(start=1, duration=2, global_rank=0, slowdown=1.5)
    events = fit(tmp_path, callbacks=[InjectFaults([fault]), RunMetrics()])
    assert [(event["event"], event["step"]) for event in events] == [
        ("started", 0),
        ("plan", 1),
        ("faults", 1),
        ("metrics", 2),
        ("faults", 3),
        ("metrics", 4),
        ("validated", 4),
        ("ended", 4),
    ]
    started, plan, faults = events[:3]
    assert started["nodes"] == ["here"]
    assert plan["number"] == 0
    assert len(started["plans"]) == 1
    assert faults["faults"][0]["slowdown"] == 1.5
    assert events[4]["faults"] == []
    assert set(events[3]["scalars"]) > {"run/iteration_s", "run/tokens_per_s"}
    assert events[6]["metrics"]["val_loss"] > 0
    times_s = [event["at_s"] for event in events]
    assert times_s == sorted(times_s)


def test_another_start_goes_on_in_the_same_file_under_any_strategy(tmp_path):
    fit(tmp_path, strategy="auto")
    events = fit(tmp_path, strategy="auto")
    assert [event["event"] for event in events] == ["started", "validated", "ended"] * 2


def test_a_rank_that_fails_says_so_before_it_ends(tmp_path):
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, module=Failing(ToyOptions()))
    *_, last = read_log(tmp_path / "events.jsonl")
    assert (last["event"], last["step"], last["node"]) == ("failed", 3, "here")
    assert last["error"] == "RuntimeError: enough"


@pytest.mark.parametrize("name", ["events.jsonl", "own.jsonl"])
def test_a_monitor_writes_to_the_log_of_its_run_or_to_a_file_of_its_own(tmp_path, name):
    events = fit(tmp_path, callbacks=[StragglerMonitor(events=name)])
    assert [event.step for event in read_events(tmp_path / name)] == [1, 2, 3, 4]
    assert ("iteration" in {event["event"] for event in events}) == (name == "events.jsonl")
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"events.jsonl", name}


def test_a_plan_is_written_whole_once_and_a_change_at_most_a_thousand_times(tmp_path):
    log, strategy = RunLog("log"), HeteroStrategy()
    trainer = types.SimpleNamespace(
        strategy=strategy,
        callbacks=[log],
        is_global_zero=True,
        global_step=1,
        default_root_dir=tmp_path,
    )
    plans = [ParallelPlan.from_dict({"pipelines": [{"stages": [stage]}]}) for stage in STAGES]
    log.setup(trainer, None, "fit")
    log._plans = plans[:2]
    for step in range(1500):
        strategy._slices.engine = types.SimpleNamespace(plan=plans[step % 3])
        log.on_train_batch_end(trainer, None, None, None, step)
    noted = list(read_log(tmp_path / "log"))
    assert [event["number"] for event in noted] == [step % 3 for step in range(1000)]
    assert [event["plan"] for event in noted if "plan" in event] == [plans[2].to_dict()]
