"""The cluster examples: shell and YAML parse, and their verl commands are valid configurations of what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from verl.config import load_config, processes, resolve, validate
from verl.errors import ConfigError
from verl.trainer.placement import placement_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = [EXAMPLES / "ray/cluster.sh", EXAMPLES / "ray/one_machine.sh", EXAMPLES / "slurm/train.sbatch"]
JOB = EXAMPLES / "kuberay/rayjob.yaml"

pytestmark = pytest.mark.skipif(not JOB.is_file(), reason="not run from a clone")


def overrides(text: str) -> list[str]:
    """What follows ``verl train`` in a script, with numbers for the variables that are numbers."""
    line = text.replace("\\\n", " ").split("verl train ", 1)[1].splitlines()[0].replace(' "$@"', "")
    line = line.replace("$SLURM_JOB_NUM_NODES", "2").replace("$HEAD:$PORT", "10.0.0.1:20001")
    return [re.sub(r"\$(\w+)", r"/\1", word) for word in shlex.split(line)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(script):
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("file", [*SCRIPTS, JOB], ids=lambda path: path.name)
def test_commands_are_valid_configurations(file):
    text = file.read_text()
    if file == JOB:
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    config = load_config(overrides(text))
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert all("no such f" in problem for problem in caught.value.problems), "only the files are not here"
    config = resolve(config)
    if file.name == "one_machine.sh":
        assert placement_of(config).describe() == "actor: 3 ranks (actor) · critic: 1 rank (critic)"
    else:
        assert processes(config) == 8 and config.trainer.ray_address and config.trainer.max_restarts == 3


def test_the_kubernetes_job_has_the_gpus_that_the_run_asks_for():
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    config = load_config(overrides("verl train " + job["spec"]["entrypoint"].split("verl train ", 1)[1]))
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == config.trainer.nnodes
    for group in (workers, job["spec"]["rayClusterSpec"]["headGroupSpec"]):
        [container] = group["template"]["spec"]["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert gpus == (config.trainer.n_gpus_per_node if group is workers else 0)
