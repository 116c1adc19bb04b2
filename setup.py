from setuptools import find_namespace_packages, setup

setup(
    name="verl-agentopsd",
    version="0.1.0",
    packages=find_namespace_packages(include=["verl.agentopsd", "verl.agentopsd.*", "agentopsd_config", "agentopsd_config.*"]),
)
