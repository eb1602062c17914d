"""The README says what the commands print."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUPPORTED = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")


def console_blocks() -> list[tuple[str, str]]:
    """Return (command, output) of each console block."""
    blocks = re.findall(r"```console\n\$ (.+?)\n(.*?)```", README, flags=re.DOTALL)
    return [(command, output) for command, output in blocks]


def as_words(text: str) -> list[str]:
    """Return the words, without the line that counts what the search has looked at."""
    lines = [line for line in text.splitlines() if not line.startswith("searched")]
    return " ".join(lines).split()


@pytest.mark.parametrize(("command", "output"), console_blocks())
def test_a_command_prints_what_the_readme_shows(command: str, output: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "lightning-hetero"
    result = subprocess.run(
        [sys.executable, "-m", "lightning_hetero.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "COLUMNS": "100", "PYTHONPATH": str(ROOT)},
    )
    assert as_words(result.stdout) == as_words(output)


def test_every_file_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 150


def test_words_are_explained_before_the_diagram_uses_them() -> None:
    before, diagram = README.split("## How it works")[1].split("```")[:2]
    for word in ("pipeline", "stages", "micro-batches", "slices", "pull", "push"):
        assert word.rstrip("s") in diagram, word
        assert re.search(rf"\*{word}\*", before), word


def test_layers_of_a_plan_say_that_their_end_is_exclusive() -> None:
    first = next(line for line in README.splitlines() if '"layers": [' in line)
    assert first.endswith("# layers 0 to 3: the end is exclusive")


def test_five_measurements_stand_here_and_in_the_table_of_all() -> None:
    lines = re.findall(r"^- .+$", README.split("## Measured")[1].split("\n## ")[0], re.MULTILINE)
    assert 1 <= len(lines) <= 5
    table = (ROOT / "examples/measured.md").read_text("utf-8")
    for line in lines:
        (command,) = re.findall(r"`(python [^`]+)`$", line)
        assert command in table, command


def test_nothing_is_claimed_of_what_has_not_been_run() -> None:
    (line,) = [line for line in SUPPORTED.splitlines() if line.startswith("| gloo")]
    assert line.startswith("| gloo: tested | NCCL is implemented and has not been run")
    assert re.search(r"CUDA and NCCL are implemented and have\s+not been run", README)


PROOFS: dict[str, tuple[str, ...]] = {
    "any module with a list of like layers": (
        "runtime/test_parity.py::test_any_plan_trains_as_a_single_device_does",
        "runtime/steps/test_layers.py::test_layers_that_are_no_chain_train_in_plans_with_one_stage_only",
        "runtime/test_right_or_refused.py::test_what_a_stage_can_not_know_is_refused_by_name",
    ),
    "layers that change the hidden state's shape": (
        "runtime/steps/test_layers.py::test_layers_may_change_shape_and_dtype_of_the_hidden_state",
        "runtime/steps/test_layers.py::test_routers_logits_of_all_layers_reach_the_loss",
        "runtime/test_right_or_refused.py::test_what_stages_can_know_trains_as_on_one_device",
        "runtime/test_right_or_refused.py::test_what_a_stage_can_not_know_is_refused_by_name",
    ),
    "weights outside the layers at both ends": (
        "runtime/steps/test_layers.py::test_parameters_outside_the_layers_are_there_wherever_a_step_reads_them",
        "runtime/steps/test_layers.py::test_steps_may_compute_with_parameters_that_a_rank_has_whole",
    ),
    "losses that are means or sums": (
        "runtime/steps/test_losses.py::",
        "runtime/results/test_split_check.py::test_nearly_all_losses_and_layers_are_judged_right",
    ),
    "what steps return": (
        "runtime/results/test_outputs.py::test_outputs_and_collected_lists_are_those_of_one_device",
        "runtime/results/test_metrics.py::test_metrics_are_those_of_one_device",
        "runtime/results/test_step_logs.py::test_what_steps_log_is_what_one_device_logs",
    ),
    "`torch.utils.checkpoint` in the model": (
        "runtime/stage/test_own_checkpoints.py::test_own_checkpoints_change_no_bit_of_training",
        "runtime/stage/test_own_checkpoints.py::test_older_checkpoints_are_refused_in_stages_by_name",
        "strategy/test_refused.py::test_a_model_that_is_compiled_as_a_whole_is_refused",
    ),
    "`configure_optimizers` by name or whole shape": (
        "runtime/steps/test_hooks.py::test_hooks_get_one_devices_numbers",
        "runtime/slices/test_known_by_shape.py::test_values_are_refused_by_name",
    ),
    "buffers from the rank that computes": (
        "runtime/steps/test_layers.py::test_buffers_are_those_of_a_single_device_whoever_computes_their_layer",
        "runtime/steps/test_layers.py::test_buffers_that_follow_what_a_micro_batch_holds_are_refused_unless_that_is_wanted",
        "runtime/steps/test_losses.py::test_samples_that_meet_are_refused_on_every_rank_unless_that_is_wanted",
    ),
    "fit, validate, test, predict": (
        "test_lightning_features.py::test_a_feature_of_fit_gives_what_a_single_device_gives_on_every_rank",
        "runtime/steps/test_hooks.py::test_hooks_and_steps_that_would_differ_between_ranks_are_refused",
    ),
    "`32-true`, `bf16-mixed`": (
        "runtime/iteration/test_gradient_sums.py::test_gradients_of_bf16_are_summed_in_fp32",
        "strategy/test_precision.py::test_steps_compute_in_the_dtypes_of_lightning",
        "strategy/test_loss_scale.py::",
    ),
    "frozen weights, which never travel": (
        "runtime/test_adapters.py::test_only_adapters_are_owned_and_travel",
    ),
    "consolidated checkpoints": (
        "strategy/test_strategy.py::test_a_checkpoint_is_what_plain_lightning_writes",
        "strategy/test_sliced.py::test_a_trainer_goes_on_behind_a_run_as_on_a_single_device",
        "strategy/test_sliced.py::test_a_use_of_values_behind_a_run_is_refused_by_name_with_the_remedy",
    ),
    "ordinary data loaders": ("data/test_dealing.py::",),
    "tensor parallelism in a stage": (
        "runtime/tensor_parallel/test_sharding.py::test_any_small_plan_with_degrees_trains_as_a_single_device_does",
        "runtime/test_huggingface.py::test_key_heads_are_shared_out_to_groups_of_any_degree",
        "runtime/test_adapters.py::test_lora",
    ),
    "Hugging Face models": (
        "runtime/test_huggingface.py::",
        "models/huggingface/test_training.py::",
        "models/huggingface/test_architectures.py::",
    ),
    "plans that change from one iteration": (
        "runtime/test_change_plan.py::test_losses_and_weights_do_not_depend_on_changes_of_plan",
        "runtime/iteration/test_schedules.py::test_random_plans_change_no_bit",
        "callbacks/test_elastic.py::",
    ),
    "a rank that dies or freezes": (
        "callbacks/test_in_place.py::test_lost_ranks_leave_the_losses_and_the_samples_as_they_were",
        "callbacks/test_in_place.py::test_a_process_joins_and_leaves_between_two_steps_and_no_step_is_trained_again",
        "runtime/generation/test_joiners.py::",
        "runtime/exchange/test_redundancy.py::test_copies_are_equal_bit_for_bit_and_train_as_one_device",
        "runtime/exchange/test_redundancy.py::test_a_changed_copy_is_found_and_named_on_every_rank",
        "accelerator/test_accelerator.py::test_slices_on_the_host_are_stepped_there",
    ),
    "gloo": (
        "runtime/test_gpu.py::",
        "rendezvous/test_recorded.py::",
        "accelerator/test_accelerator.py::test_no_host_waits_for_its_device_in_a_steady_iteration",
        "accelerator/test_accelerator.py::test_streams_share_no_memory_without_waiting_for_each_other",
    ),
}
"""Tests behind each line of the table of what works and what doesn't, by the line's first words."""


def test_each_line_of_what_works_has_tests() -> None:
    table = SUPPORTED.split("| works | doesn't |")[1].split("\n\n")[0]
    lines = [line.removeprefix("| ") for line in table.splitlines()[2:]]
    assert len(lines) == len(PROOFS)
    for line, (words, proofs) in zip(lines, PROOFS.items(), strict=True):
        assert line.startswith(words)
        for proof in proofs:
            file, _, name = proof.partition("::")
            text = (ROOT / "tests" / file).read_text("utf-8")
            assert f"def {name or 'test_'}" in text, proof
