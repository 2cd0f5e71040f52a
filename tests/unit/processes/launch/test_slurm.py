"""The cluster's file of a Slurm step, from the variables of its tasks."""

import os
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509

from jdag.errors import ScenarioError
from jdag.processes.launch.main_session import Session
from jdag.processes.launch.slurm import hosts_of, write_cluster_file
from jdag.processes.session.cluster_file import load_cluster_file
from tests.tools.certificates import Issuer
from tests.tools.command_cases import command as jdag
from tests.tools.documents import block
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import TOKEN, plain, plan_of
from tests.unit.cli.test_hosting import running, until

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[08-10,12]",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
}
ONE_HOST = {
    "SLURM_JOB_ID": "11",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[008-010,12],gpu7", ["node008", "node009", "node010", "node12", "gpu7"]),
        ("r[1-2]n[01,3].x", ["r1n01.x", "r1n3.x", "r2n01.x", "r2n3.x"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
    ],
)
def test_a_list_of_hosts_is_read_as_scontrol_reads_it(text, hosts):
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "node[1-", "node[3-1]", "node[]", "a,,b", "a b", "n[1-999999999]", "n[x]"],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, tmp_path: Path):
    wrong = {**STEP, "SLURM_STEP_NODELIST": text}
    allowed = r"SLURM_STEP_NODELIST = .*: expected a Slurm host list, such as"
    with pytest.raises(ScenarioError, match=allowed):
        write_cluster_file(tmp_path / "cluster.toml", wrong)


def test_each_task_is_a_worker_on_its_host_and_all_write_the_same_file(tmp_path: Path):
    made = Issuer(tmp_path, "ca").issue("host")
    made.certificate.rename(tmp_path / "host.pem")
    (tmp_path / "token").write_text(TOKEN)
    path, texts = tmp_path / "cluster.toml", []
    for task, node in enumerate((0, 1, 2, 2)):
        mine = {**STEP, "SLURM_PROCID": str(task), "SLURM_NODEID": str(node)}
        assert write_cluster_file(path, mine) == f"w{task}"
        texts.append(path.read_text())
    assert len({*texts}) == 1
    settings = load_cluster_file(path)
    hosts = {name: one.control.host for name, one in settings.workers.items()}
    assert hosts == {
        "main": "node08", "w0": "node08", "w1": "node09", "w2": "node10", "w3": "node10"
    }  # fmt: skip
    assert len({one.control.port for one in settings.workers.values()}) == 5
    assert settings.token == TOKEN
    assert settings.tls_files is not None


def test_another_job_listens_at_other_ports(tmp_path: Path):
    ports = []
    for name in ("token", "ca.pem", "host.pem", "host.key"):
        (tmp_path / name).touch()
    for job in ("4711", "4712"):
        write_cluster_file(tmp_path / "cluster.toml", {**STEP, "SLURM_JOB_ID": job})
        workers = load_cluster_file(tmp_path / "cluster.toml").workers.values()
        ports += [one.control.port for one in workers]
    assert len({*ports}) == 10


@pytest.mark.parametrize(
    ("changes", "workers", "said"),
    [
        ({"SLURM_JOB_ID": None}, None, "SLURM_JOB_ID = None: .* srun jdag up --slurm"),
        ({"SLURM_PROCID": "9"}, None, "SLURM_PROCID = 9: expected an integer below"),
        ({"SLURM_PROCID": "x"}, None, "SLURM_PROCID = 'x': expected an integer"),
        (
            {"SLURM_NODEID": "0"},
            None,
            "= 0: expected 2 for task 2; use srun --distribution=block",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, None, r"'2\(3\)': expected Slurm task"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
            None,
            r"SLURM_STEP_TASKS_PER_NODE .*\[1, 1, 1\]: .*with the sum 4",
        ),
        (
            {},
            "t,a,b,c,d,e",
            "--workers = 't,.*: expected 5 different names, of main and of the 4 tasks",
        ),
        ({}, "t,a,b,c,a", "5 different names, of main and of the 4 tasks"),
        ({}, "t,a,b,c,-", "--workers = '-': expected at most 64 letters, digits"),
    ],
)
def test_variables_that_make_no_cluster_are_one_line(changes, workers, said, tmp_path):
    step = {**STEP, **changes}
    step = {key: text for key, text in step.items() if text is not None}
    with pytest.raises(ScenarioError, match=said) as refused:
        write_cluster_file(tmp_path / "c.toml", step, workers and workers.split(","))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "c.toml").exists()


def test_a_file_that_a_user_wrote_is_kept(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_text("[workers.a]\n")
    with fails_with(ScenarioError, "processes.this_one_was_not_made"):
        write_cluster_file(path, STEP)
    assert path.read_text() == "[workers.a]\n"


@pytest.mark.parametrize("missing", ["token", "ca.pem", "host.pem", "host.key"])
def test_several_hosts_without_certificates_are_refused_and_no_file_is_left(
    tmp_path: Path, monkeypatch, missing
):
    for key, text in STEP.items():
        monkeypatch.setenv(key, text)
    for name in ("token", "ca.pem", "host.pem", "host.key"):
        (tmp_path / name).write_text(TOKEN)
    (tmp_path / missing).unlink()
    code, _, said = jdag("up", tmp_path / "cluster.toml", "--slurm")
    assert code == 2 and f" of the file, but {missing} is missing\n" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "cluster.toml").exists()


def test_workers_are_named_under_slurm_only(tmp_path: Path):
    for options, text in (
        (
            ("--workers", "main,a"),
            "--workers = 'main,a': expected no such option without --slurm",
        ),
        (
            ("--slurm", "--only", "w0"),
            "--only = 'w0': expected no such option with --slurm",
        ),
    ):
        code, _, said = jdag("up", tmp_path / "cluster.toml", *options)
        assert code == 2 and text in said


@pytest.mark.second
def test_tasks_of_srun_are_workers_that_a_program_joins(tmp_path: Path, monkeypatch):
    path = tmp_path / "cluster.toml"
    for key, text in ONE_HOST.items():
        monkeypatch.setenv(key, text)
    options = ("up", path, "--slurm", "--workers", "trainer,a,b")
    with ExitStack() as stack:
        commands = []
        for task in "01":
            monkeypatch.setenv("SLURM_PROCID", task)
            commands.append(stack.enter_context(running(*options)))
        for command in commands:
            until(command, "press Ctrl-C to stop the workers")
        settings = load_cluster_file(path)
        controls = {name: settings.worker(name).control for name in "ab"}
        session = stack.enter_context(Session(plan_of(controls, token=settings.token)))
        for name in "ab":
            answer = f"answer hi from {name}\n".encode()
            assert plain(session).ask(name, b"hi") == answer


@pytest.mark.second
def test_the_batch_script_of_the_guide_certifies_all_hosts_of_the_job(tmp_path: Path):
    text = block("docs/howto/slurm.md", "bash", "#SBATCH").partition("\nsrun")[0]
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node08\necho node09\n")
    (tmp_path / "scontrol").chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {"PATH": path, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environ, check=True)
    made = tmp_path / "jdag-7"
    step = {**STEP, "SLURM_JOB_NODELIST": "node[08-10]"}
    write_cluster_file(made / "cluster.toml", step)
    settings = load_cluster_file(made / "cluster.toml")
    assert len(settings.token) == 64 and settings.tls_files is not None
    with settings.tls_files[1].open("rb") as pem:
        found = x509.load_pem_x509_certificate(pem.read())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == ["node08", "node09"]
    assert stat.S_IMODE((made / "host.key").stat().st_mode) == 0o600
