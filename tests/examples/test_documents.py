"""Manifests and tables of the examples name what exists: files, options."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TABLE = (EXAMPLES / "README.md").read_text("utf-8")


def test_every_example_is_in_the_list_and_its_command_has_options_that_exist():
    for path in EXAMPLES.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"]({path.name})" in TABLE, path.name
    for command in re.findall(r"`(python examples/[^`]+)`", TABLE):
        _, script, *arguments = shlex.split(command)
        source = (ROOT / script).read_text("utf-8")
        for argument in arguments:
            if argument.startswith("--") and argument != "--config":
                assert f'"{argument}"' in source, command


def check(command, monkeypatch, capsys):
    """Let torchrun and the fine-tuning example read their options, without running them."""
    pytest.importorskip("transformers")
    options = get_args_parser().parse_args(command)
    assert (ROOT / options.training_script).is_file()
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(ROOT)
    example = importlib.import_module("finetune_hf")
    monkeypatch.setattr(sys, "argv", ["x", *options.training_script_args, "--print_config"])
    with pytest.raises(SystemExit) as ended:
        example.FineTuneCLI(example.FineTuned, example.TokenizedSources)
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    trainer = yaml.safe_load(output.out)["trainer"]
    assert trainer["strategy"]["init_args"]["plan"] == "auto"
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in trainer["callbacks"]]
    assert names == ["LayerwiseCheckpoint", "ElasticRestart", "StragglerMonitor"]
    checkpoint = trainer["callbacks"][0]["init_args"]
    assert (checkpoint["path_or_url"], checkpoint["replicas"]) == ("s3://bucket/hetero", 2)


def test_the_manifest_gives_torchrun_and_the_example_options_that_they_know(monkeypatch, capsys):
    manifest = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text("utf-8"))
    policy = manifest["spec"]["elasticPolicy"]
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (container["name"], container["command"]) == ("pytorch", ["torchrun"])
    check(container["args"], monkeypatch, capsys)


def test_the_slurm_script_gives_torchrun_and_the_example_options_that_they_know(
    monkeypatch, tmp_path, capsys
):
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo first; echo second")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh")],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **job},
        capture_output=True,
        text=True,
        check=True,
    )
    _, program, *command = done.stdout.splitlines()
    assert program == "torchrun"
    assert {"--rdzv-endpoint=first:29500", "--nnodes=2:4"} <= {*command}
    check(command, monkeypatch, capsys)
