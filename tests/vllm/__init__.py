"""Tests on real engines of vLLM, in an environment of their own: `make test-vllm`."""

import os

from testing.vllm_environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)
