"""Tests on real engines of vLLM, in an environment of their own: `make test-vllm`."""

import os

from testing.engine_environments import VLLM_VARIABLES

os.environ.update(VLLM_VARIABLES)
