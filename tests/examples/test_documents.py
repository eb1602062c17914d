"""Pages and manifests name what exists: files, modules, options."""

import ast
import importlib
import inspect
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
PAGES = [ROOT / "README.md", *sorted(EXAMPLES.glob("*.md"))]


def snippets():
    """Return the Python blocks of all pages."""
    return [
        block
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    ]


def imported_names(tree):
    """Import what a block imports; return the objects by the names that it uses."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            found |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name] = importlib.import_module(name.name)
    return found


@pytest.mark.parametrize("block", snippets(), ids=range(len(snippets())))
def test_a_snippet_compiles_and_calls_what_exists_with_options_that_exist(block):
    tree = ast.parse(block)
    known = imported_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, *attributes = ast.unparse(node.func).split(".")
        if name not in known:
            continue
        target = known[name]
        for attribute in attributes:
            target = getattr(target, attribute)
        if inspect.isbuiltin(target):
            continue  # It tells no signature; blocks are run as well, by `test_first_hour`.
        inspect.signature(target).bind_partial(
            *node.args, **{keyword.arg: None for keyword in node.keywords}
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    named = [page.parent / link for link in links]
    named += [ROOT / path for path in re.findall(r"examples/[\w./-]+\.(?:py|yaml|sh)", text)]
    for path in named:
        assert path.exists(), path


def test_every_example_is_in_the_list():
    text = (EXAMPLES / "README.md").read_text("utf-8")
    for path in EXAMPLES.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"]({path.name})" in text, path.name


def script_arguments(command):
    """Let torchrun read its options; return the script and what is meant for it."""
    options = get_args_parser().parse_args(command)
    return options.training_script, options.training_script_args


def accepts(arguments, monkeypatch, capsys):
    """Tell what the fine-tuning example makes of its arguments, without running it."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(ROOT)
    example = importlib.import_module("finetune_hf")
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", *arguments, "--print_config"])
    with pytest.raises(SystemExit) as ended:
        example.FineTuneCLI(example.FineTuned, example.TokenizedSources)
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return yaml.safe_load(output.out)


def check_config(config):
    trainer = config["trainer"]
    assert trainer["strategy"]["init_args"]["plan"] == "auto"
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in trainer["callbacks"]]
    assert names == ["LayerwiseCheckpoint", "ElasticRestart", "StragglerMonitor"]
    checkpoint = trainer["callbacks"][0]["init_args"]
    assert checkpoint["path_or_url"] == "s3://bucket/hetero"
    assert checkpoint["replicas"] == 2


def test_the_manifest_gives_torchrun_and_the_example_options_that_they_know(monkeypatch, capsys):
    manifest = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text("utf-8"))
    policy = manifest["spec"]["elasticPolicy"]
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"] == ["torchrun"]
    script, arguments = script_arguments(container["args"])
    assert (ROOT / script).is_file()
    check_config(accepts(arguments, monkeypatch, capsys))


def test_the_slurm_script_gives_torchrun_and_the_example_options_that_they_know(
    monkeypatch, tmp_path, capsys
):
    script = EXAMPLES / "slurm.sh"
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo first; echo second")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_JOB_ID": "7",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, program, *command = done.stdout.splitlines()
    assert program == "torchrun"
    assert "--rdzv-endpoint=first:29500" in command
    assert "--nnodes=2:4" in command
    path, arguments = script_arguments(command)
    assert (ROOT / path).is_file()
    check_config(accepts(arguments, monkeypatch, capsys))


def commands():
    """Return the commands of the table of examples."""
    text = (EXAMPLES / "README.md").read_text("utf-8")
    return re.findall(r"`(python examples/[^`]+)`", text)


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_list_has_options_that_its_script_knows(command):
    _, script, *arguments = shlex.split(command)
    source = (ROOT / script).read_text("utf-8")
    for argument in arguments:
        if argument.startswith("--") and argument != "--config":
            assert f'"{argument}"' in source, argument


def test_examples_write_where_git_does_not_look() -> None:
    """What `--out` is by default, or the first argument of a shell script."""
    written = {
        path.name: re.findall(r'"--out",.*?default=(?:Path\()?"([^"]+)"|out=.*?:-([^}]+)}', text)
        for path in EXAMPLES.iterdir()
        if path.suffix in (".py", ".sh") and "out" in (text := path.read_text("utf-8"))
    }
    found = {name: "".join(parts) for name, folders in written.items() for parts in folders}
    assert {"elastic.py", "elastic.sh", "soak.py"} <= found.keys()
    assert all(folder.startswith("outputs/") for folder in found.values()), found
