"""Engines in this suite live in the test process, so that tests can look inside."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if "SECOND_RUNNER" in os.environ:
    from tests import second_runner

    second_runner.bring()
